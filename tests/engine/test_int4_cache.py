"""Engines with a cache of 4 bits: near the float cache, a quarter of its memory, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from qcut.engine.engine import Engine
from qcut.engine.kv_cache.cache import KVCache
from qcut.errors import ConfigError
from qcut.numerics.int8 import sqnr_db
from tests.support.decoders import VOCABULARY, prompts_of, sizes, small


def model_of(kind: str) -> Any:
    """A model with heads of 32 columns."""
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes(head_dim=32))).eval()
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2, eos_token_id=None, bos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("kv_cache", "db"), [("int4", 18), ("int8/int4", 20)])
def test_it_is_near_the_float_cache(kind: str, kv_cache: Any, db: float) -> None:
    model, prompts = model_of(kind), prompts_of(VOCABULARY, 33, 7)
    exact, engine = Engine(model, batch=2), Engine(model, batch=2, kv_cache=kv_cache)
    want, got = exact.prefill(prompts), engine.prefill(prompts)
    for token in (3, 4):
        assert sqnr_db(want, got) > db
        want, got = exact.decode([token, token + 1]), engine.decode([token, token + 1])


@pytest.mark.parametrize("kv_cache", ["int4", "int8/int4"])
def test_prefill_and_decode_fill_the_same_cache(kv_cache: Any) -> None:
    model, (prompt,) = model_of("llama"), prompts_of(VOCABULARY, 20)
    whole, steps = (Engine(model, kv_cache=kv_cache) for _ in range(2))
    want = whole.prefill([prompt])
    steps.prefill([prompt[:-1]])
    got = steps.decode(prompt[-1:])
    assert (got - want).abs().max() <= 1e-3 * want.abs().max()
    assert whole.generate([prompt], 9) == steps.generate([prompt], 9)


@pytest.mark.parametrize(("head", "times"), [(64, 3.76), (128, 3.87)])
def test_memory_is_less_by_more_than_three_and_a_half(head: int, times: float) -> None:
    place: dict[str, Any] = {"dtype": torch.float16, "device": torch.device("cpu")}
    auto, int4, both = (KVCache(2, 4, 2, 64, head, **place, kv_dtype=kind) for kind in ("auto", "int4", "int8/int4"))
    assert auto.nbytes / int4.nbytes > times
    assert both.nbytes == 2 * 4 * 2 * 64 * (head + 4 + head // 2 + 2)


def test_layers_start_where_kernels_read_whole_vectors() -> None:
    cache = KVCache(3, 1, 1, 7, 32, dtype=torch.float16, device=torch.device("cpu"), kv_dtype="int4")
    for layer in range(3):
        for part in cache.layer(layer):
            assert part is not None
            assert part.data_ptr() % 16 == 0
            assert part.is_contiguous()


def test_heads_of_other_sizes_are_refused() -> None:
    for kv_cache in ("int4", "int8/int4"):
        with pytest.raises(ConfigError, match="a 4-bit cache of heads of 8 columns; allowed: 32, 64, 128, 256"):
            Engine(small("llama"), kv_cache=kv_cache)  # type: ignore[arg-type]
    for kv_cache in ("int3", "int4/int8", "int8/", "int4/int4", ""):
        with pytest.raises(ConfigError, match="; allowed: auto, int8, int4, int8/int4"):
            Engine(small("llama"), kv_cache=kv_cache)  # type: ignore[arg-type]


def test_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int4' of a float32 model; allowed on a GPU: float16 and bfloat16 models"):
        KVCache(1, 1, 1, 4, 64, dtype=torch.float32, device=torch.device("cuda"), kv_dtype="int4")
