"""Every family of the engine on the GPU: the CPU's tokens in float32, transformers' logits in float16."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

import qcut
from benchmarks.engine import steps
from qcut.engine.engine import Engine
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import KINDS, MIXTURES, VOCABULARY, WIDE, prompts_of, small

SCHEMES = (None, "w8a8", "int16x8", "w8a16", "codebook4_g32", "codebook4_g32_int8", "codebook4_pairs_g32")
DENSE = tuple(kind for kind in KINDS if kind not in MIXTURES)
MIXTURE_SCHEMES = ("w8a8", "int16x8", "codebook4_g32")
"""Experts in float are for the CPU."""
OF_GPT_OSS = ("w8a16", "codebook4", "codebook4_g64", "mxfp4")
"""With 192 columns, which `codebook4` ends in a half group, as the 2,880 of GPT-OSS."""
SIZES: dict[str, dict[str, int]] = {kind: {"head_dim": 32} for kind in ("qwen3", "gemma", "gemma2", "gemma3")}
SIZES |= {kind: {"moe_intermediate_size": 64} for kind in MIXTURES}
SIZES["hunyuan_v1_moe"] |= {"head_dim": 32}
SIZES["gpt_oss"] |= {"head_dim": 64, "hidden_size": 192}


def model_of(kind: str, scheme: str | None, dtype: torch.dtype, device: str = DEVICE) -> Any:
    changes = {} if kind == "phi3_long" else WIDE | SIZES.get(kind, {})  # its frequencies are listed for heads of 8
    model = small(kind, **changes).to(device, dtype)
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return model


@pytest.mark.parametrize(("kind", "scheme"), [*product(DENSE, (None, "w8a8")), *product(MIXTURES, ("w8a8",))])
def test_float32_tokens_are_the_cpus(kind: str, scheme: str | None) -> None:
    cpu = model_of(kind, scheme, torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, 7, 30, 1)
    want = Engine(cpu, batch=3).generate(prompts, 12)
    assert Engine(copy.deepcopy(cpu).to(DEVICE), batch=3).generate(prompts, 12) == want


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *product(DENSE, SCHEMES),
        *product(MIXTURES, MIXTURE_SCHEMES),
        *product(["gpt_oss"], OF_GPT_OSS),
        *product(["llama", "gpt2", "qwen3_moe", "gpt_oss"], ["w8a8_rotated"]),
    ],
)
def test_logits_are_transformers(kind: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind.startswith(("gemma", "gpt_oss")):  # norms are rounded twice, which moves some int8 activations by a step
        monkeypatch.setattr(steps, "MIN_COSINE", 0.99)
        monkeypatch.setattr(steps, "MIN_COSINE_ROUTED", 0.99)
    model = model_of(kind, scheme, torch.float16)
    with torch.no_grad():
        steps.check(Engine(model, batch=2), model, prompts_of(VOCABULARY, 40))


@pytest.mark.parametrize("kv_cache", ["auto", "int8", "int4", "int8/int4"])
def test_sinks_with_every_cache(kv_cache: Any) -> None:
    """Prefill and decode read the same; caches of 4 bits have routes of their own, by the last bits of keys."""
    cpu = model_of("gpt_oss", "w8a16", torch.float32, "cpu")
    model, (prompt,) = copy.deepcopy(cpu).to(DEVICE, torch.float16), prompts_of(VOCABULARY, 40)
    whole, stepped = (Engine(model, kv_cache=kv_cache) for _ in range(2))
    stepped.prefill([prompt[:-1]])
    got, again = whole.prefill([prompt]), stepped.decode(prompt[-1:])
    assert steps.cosine(got, again) > 0.999
    if kv_cache in ("auto", "int8"):
        want = Engine(cpu, kv_cache=kv_cache).prefill([prompt])
        assert steps.cosine(got.cpu().float(), want) > 0.997


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize(
    "kind", ["phi3_partial", "smollm3", "gpt_neox", "gemma2", "gemma3", "olmo2", "mistral_window", *MIXTURES]
)
def test_graphs_are_the_launches(kind: str, kv_cache: Any) -> None:
    model, prompts = model_of(kind, "w8a8", torch.float16), prompts_of(VOCABULARY, 20, 3)
    launched, captured = (Engine(model, batch=2, graphs=graphs, kv_cache=kv_cache) for graphs in (False, True))
    for engine in (launched, captured):
        engine.prefill(prompts)
    for token in (5, 7, 11):
        assert_same(captured.decode([token, token + 1]), launched.decode([token, token + 1]))
