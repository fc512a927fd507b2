"""Small models of random sizes on the GPU: the CPU's tokens, or a refusal by qcut before anything is built."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

import qcut
from qcut.engine.engine import Engine
from qcut.engine.kv_cache.cache import KVDtype
from qcut.errors import ConfigError, QuantizationError, UnsupportedError
from qcut.numerics.sampling import Sampling
from tests.gpu.support.oracles import DEVICE

HEADS = (8, 16, 24, 32, 64, 80, 96, 128)
WIDTHS = (64, 96, 128, 160, 192, 256)
SCHEMES = (None, "w8a8", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook4_g32", "codebook4_g32_int8")
CACHES: tuple[KVDtype, ...] = ("auto", "auto", "int8", "int4", "int8/int4")
COUNT = 60


class Sizes(NamedTuple):
    """Of a model, and what it is computed with."""

    kind: str
    head: int
    heads: int
    keys: int
    hidden: int
    mlp: int
    dtype: torch.dtype
    scheme: str | None
    cache: KVDtype

    def model(self) -> Any:
        heads = {"num_hidden_layers": 2, "num_attention_heads": self.heads, "vocab_size": 97}
        sizes = {**heads, "hidden_size": self.hidden, "intermediate_size": self.mlp, "initializer_range": 0.2}
        config: Any
        if self.kind == "gpt2":
            config = GPT2Config(n_embd=self.hidden, n_layer=2, n_head=self.heads, n_inner=self.mlp, vocab_size=97)
        elif self.kind == "gpt_neox":
            config = GPTNeoXConfig(**sizes)
        else:
            config = LlamaConfig(**sizes, head_dim=self.head, num_key_value_heads=self.keys)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def drawn(count: int, seed: int = 39) -> list[Sizes]:
    rng, found = random.Random(seed), list[Sizes]()
    while len(found) < count:
        kind, head = rng.choice(("llama", "llama", "gpt2", "gpt_neox")), rng.choice(HEADS)
        heads = rng.choice((1, 2, 3, 4, 6))
        keys = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        hidden = rng.choice([n for n in WIDTHS if n % heads == 0] or [64 * heads]) if kind == "llama" else heads * head
        dtype = rng.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32))
        rest = rng.choice((64, 96, 136, 192, 250)), dtype, rng.choice(SCHEMES), rng.choice(CACHES)
        found.append(Sizes(kind, head, heads, keys, hidden, *rest))
    return found


def name(sizes: Sizes) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in sizes)


@pytest.mark.parametrize("sizes", drawn(COUNT), ids=name)
def test_small_models_are_served_or_refused(sizes: Sizes) -> None:
    model, prompts = sizes.model().to(sizes.dtype), [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10]]
    options: dict[str, Any] = {"batch": 3, "context": 48, "kv_cache": sizes.cache}
    if sizes.cache == "int4":
        options["calibration_prompts"] = prompts
    try:
        moved = copy.deepcopy(model).to(DEVICE)
        if sizes.scheme is not None:
            qcut.quantize(moved, sizes.scheme, allow_growth=True, progress=False)
        engine = Engine(moved, **options)
    except (UnsupportedError, ConfigError, QuantizationError):
        return
    plain, drawn_ = (engine.generate(prompts, 6, sampling=s) for s in (None, Sampling(1.0, seed=1)))
    assert [len(found.tokens) for found in (*plain, *drawn_)] == [6] * 6
    logits = engine.prefill(prompts)
    assert logits.isfinite().all()
    with torch.no_grad():  # the layers as they are, in transformers' modules
        want = torch.cat([moved(torch.tensor([p], device=DEVICE)).logits[:, -1] for p in prompts])
    bound = 0.9 if "int4" in sizes.cache else 0.98 if sizes.cache == "int8" else 0.995
    assert torch.cosine_similarity(logits.float(), want.float()).min() > bound


@pytest.mark.parametrize("cache", ["int8", "int8/int4"])
def test_heads_without_a_kernel_are_refused_before_anything_is_built(cache: KVDtype) -> None:
    sizes = Sizes("llama", 8, 4, 2, 64, 96, torch.float16, None, cache)
    with pytest.raises((UnsupportedError, ConfigError), match="heads of 8 columns"):
        Engine(sizes.model().half().to(DEVICE), context=48, kv_cache=cache)
    Engine(sizes.model().half().to(DEVICE), context=48).generate([[1, 2]], 3)


def test_narrow_layers_of_one_norm_are_served() -> None:
    sizes = Sizes("llama", 16, 4, 2, 64, 96, torch.float16, "codebook4_int8", "auto")
    model = sizes.model().half().to(DEVICE)
    qcut.quantize(model, "codebook4_int8", allow_growth=True, progress=False)
    assert len(Engine(model, context=48).generate([[1, 2, 3]], 5)[0].tokens) == 5
