"""Engines of mixtures of experts: tokens and logits of the same quantized modules in transformers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import qcut
from qcut.engine.decoder import MLP
from qcut.engine.engine import Engine
from qcut.engine.families import decoder_of
from qcut.engine.mixture import Mixture
from qcut.errors import UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from tests.support.decoders import MIXTURES, VOCABULARY, last_logits, prompts_of, small, theirs

ROUTER = torch.ops.qcut.linear_route.early_read
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Heads that 4-bit caches take."""


def quantized(kind: str, scheme: str, **changes: Any) -> Any:
    """A model, its experts too, in a scheme."""
    model = small(kind, **changes)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    assert all(isinstance(stack, LinearStack) for one in experts for stack in (one.up, one.down))
    return model


def mixtures_of(model: Any) -> list[Mixture]:
    return [block.mlp for block in decoder_of(model).blocks if isinstance(block.mlp, Mixture)]


# ── quantized experts ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *((kind, "w8a8") for kind in MIXTURES),
        *(("qwen3_moe", scheme) for scheme in ("w8a16", "codebook4_g32", "codebook4_g32_int8")),
    ],
)
def test_greedy_tokens_are_transformers(kind: str, scheme: str) -> None:
    model = quantized(kind, scheme)
    prompts = prompts_of(VOCABULARY, 5, 33)
    got = Engine(model, batch=2).generate(prompts, 12)
    assert [g.tokens for g in got] == [theirs(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_decode_logits_are_transformers(kind: str) -> None:
    model = quantized(kind, "w8a8")
    engine, (prompt,) = Engine(model), prompts_of(VOCABULARY, 19)
    engine.prefill([prompt])
    for token in (3, 4, 5):
        prompt = [*prompt, token]
        got, want = engine.decode([token])[0], last_logits(model, prompt)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("kv_cache", ["int8", "int4", "int8/int4"])
def test_prefill_and_decode_fill_the_same_cache(kv_cache: Any) -> None:
    model, (prompt,) = quantized("qwen3_moe", "w8a8", **WIDE), prompts_of(VOCABULARY, 20)
    whole, steps = (Engine(model, kv_cache=kv_cache) for _ in range(2))
    want = whole.prefill([prompt])
    steps.prefill([prompt[:-1]])
    got = steps.decode(prompt[-1:])
    assert (got - want).abs().max() <= 1e-3 * want.abs().max()
    assert whole.generate([prompt], 9) == steps.generate([prompt], 9)


class Routers(TorchDispatchMode):
    """Operators from which routes come, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ROUTER, torch.ops.qcut.route.default):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MIXTURES)
def test_steps_route_in_one_operator(kind: str) -> None:
    model = quantized(kind, "w8a8")
    engine = Engine(model)
    engine.prefill([[1, 2, 3]])
    with Routers() as routers:
        engine.decode([4])
    assert routers.found.count(ROUTER) == len(mixtures_of(model))
    assert torch.ops.qcut.route.default not in routers.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_compute_what_transformers_does(dtype: torch.dtype) -> None:
    """Logits of 16 bits are rounded, except those of Ernie; Hunyuan's follow the weight."""
    for kind in ("qwen3_moe", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe"):
        model = quantized(kind, "w8a8").to(dtype)
        router, x = mixtures_of(model)[-1].router, torch.randn(7, 48).to(dtype)
        for weight in {dtype, torch.float32} if kind in ("ernie4_5_moe", "hunyuan_v1_moe") else {dtype}:
            router.gate.to(weight)
            matrix = cast(Tensor, router.gate.weight)
            wide = torch.float32 if kind == "ernie4_5_moe" else weight
            logits = F.linear(x.to(wide), matrix.to(wide))
            bias = None if router.bias is None else router.bias.flatten().float()
            want = torch.ops.qcut.route(logits, bias, **asdict(router.routing))
            assert all(torch.equal(one, other) for one, other in zip(router(x), want, strict=True))


def test_quantized_routers_compute_their_logits() -> None:
    model = small("hunyuan_v1_moe")
    qcut.quantize(model, "w8a8", include=["*.mlp.gate.wg"], allow_growth=True, progress=False)
    assert all(isinstance(mixture.router.gate, qcut.Linear) for mixture in mixtures_of(model))
    (prompt,) = prompts_of(VOCABULARY, 9)
    assert Engine(model).generate([prompt], 6)[0].tokens == theirs(model, prompt, 6)


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def test_norms_before_mixtures_stay_in_float() -> None:
    first, second = decoder_of(quantized("qwen3_moe_window", "w8a8")).blocks
    assert first.attention_norm is not None
    assert first.attention_norm.k_padded == 48
    assert isinstance(first.mlp, Mixture)
    assert first.mlp_norm is not None
    assert first.mlp_norm.k_padded is None
    assert isinstance(second.mlp, MLP)
    assert second.mlp_norm is not None
    assert second.mlp_norm.k_padded == 48


def test_shared_experts_are_stacked_and_take_absmax() -> None:
    model = quantized("qwen2_moe", "w8a8")
    for mixture in mixtures_of(model):
        assert mixture.shared is not None
        assert len(mixture.shared.mlp.projections) == 2
        assert mixture.takes_absmax(1)
    for block in Engine(model).decoder.blocks:
        assert isinstance(block.mlp, Mixture)
        assert block.mlp.shared is not None
        assert len(block.mlp.shared.mlp.projections) == 1


def test_float_experts_are_not_copied() -> None:
    model = small("qwen3_moe")
    for mixture, layer in zip(mixtures_of(model), model.model.layers, strict=True):
        ours = {p.untyped_storage().data_ptr() for p in mixture.experts.parameters()}
        assert ours == {p.untyped_storage().data_ptr() for p in layer.mlp.experts.parameters()}


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("norm_topk_prob", False)])
def test_options_of_routers_are_read_from_them(name: str, value: Any) -> None:
    model = quantized("qwen3_moe", "w8a8")
    (prompt,) = prompts_of(VOCABULARY, 21)
    before = last_logits(model, prompt)
    for layer in model.model.layers:
        setattr(layer.mlp.gate, name, value)
    want = last_logits(model, prompt)
    assert not torch.allclose(want, before, rtol=1e-2)
    assert (Engine(model).prefill([prompt])[0] - want).abs().max() <= 1e-4 * want.abs().max()


def test_unknown_float_experts_are_refused_by_layer() -> None:
    model = small("qwen3_moe")
    model.model.layers[1].mlp.experts.act_fn = nn.Softsign()
    with pytest.raises(UnsupportedError, match="experts of layer 1: Qwen3MoeExperts has a gate that qcut does not"):
        Engine(model)
