"""Engines of mixtures of experts: tokens and logits of the same quantized modules in transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import qcut
from qcut.backends.cuda import experts as experts_cuda
from qcut.engine.decoder import MLP, Block
from qcut.engine.engine import Engine
from qcut.engine.families import decoder_of
from qcut.engine.mixture import Mixture
from qcut.errors import UnsupportedError
from qcut.layers import rotations
from qcut.layers.experts import experts
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.tokens import Int8Tokens
from qcut.numerics.gating import Gating
from tests.support.decoders import MIXTURES, VOCABULARY, last_logits, prompts_of, small, theirs

ROUTER = torch.ops.qcut.linear_route.early_read
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Heads that 4-bit caches take."""


def quantized(kind: str, scheme: str, **changes: Any) -> Any:
    """A model, its experts too, in a scheme."""
    model = small(kind, **changes)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    found = [module for module in model.modules() if isinstance(module, Experts)]
    assert found
    assert all(isinstance(stack, LinearStack) for one in found for stack in (one.up, one.down))
    return model


def mixtures_of(model: Any) -> list[Mixture]:
    return [block.mlp for block in decoder_of(model).blocks if isinstance(block.mlp, Mixture)]


# ── quantized experts ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *((kind, "w8a8") for kind in MIXTURES),
        ("qwen3_moe", "w8a8_rotated"),
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
    for kind in ("qwen3_moe", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "gpt_oss"):
        model = quantized(kind, "w8a8").to(dtype)
        router, x = mixtures_of(model)[-1].router, torch.randn(7, 48).to(dtype)
        for weight in {dtype, torch.float32} if kind in ("ernie4_5_moe", "hunyuan_v1_moe") else {dtype}:
            router.gate.to(weight)
            matrix = cast(Tensor, router.gate.weight)
            wide = torch.float32 if kind == "ernie4_5_moe" else weight
            logits = F.linear(x.to(wide), matrix.to(wide), router.logits_bias)
            assert (router.logits_bias is None) is (kind != "gpt_oss")
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
    """On the CPU, where the host reads the routes."""
    first, second = decoder_of(quantized("qwen3_moe_window", "w8a8")).blocks
    x = torch.randn(3, 48)
    for norm, kind in ((first.attention_norm, Int8Tokens), (first.mlp_norm, Tensor), (second.mlp_norm, Int8Tokens)):
        assert norm is not None
        assert norm.k_padded == 48
        assert isinstance(norm(x, None)[1], kind)
    assert isinstance(first.mlp, Mixture)
    assert isinstance(second.mlp, MLP)


class Calls(TorchDispatchMode):
    """Counts operators; ``plain``: norms that write plain tokens too; ``early``: products that read routes early.

    ``routed``: norms that add results of routes.
    """

    plain: ClassVar = {"add_norm_rotated": 10, "add_norm_int8": 7}

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("qcut::")
        self.count[name] += 1
        place = self.plain.get(name, len(args))
        self.count["plain"] += isinstance(args[place] if place < len(args) else None, Tensor)
        self.count["routed"] += (
            name.startswith("add_norm") and isinstance(args[1], Tensor) and len(args[0]) < len(args[1])
        )
        self.count["early"] += name == "codebook_experts" and any(arg is True for arg in args)
        return func(*args, **(kwargs or {}))


def as_on_gpus(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA on the CPU, with tiles of a size: the operators' CPU implementations behind it."""
    monkeypatch.setattr(experts, "_has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)
    monkeypatch.setattr(experts_cuda, "tile_size", lambda *_: size)


def counted_steps(model: Any, batch: int) -> tuple[list[Tensor], Counter[str]]:
    """Logits of a prompt and of two steps of so many sequences, and what the last step calls."""
    engine = Engine(model, batch=batch)
    logits = [engine.prefill(prompts_of(VOCABULARY, *range(40, 40 + batch))), engine.decode(list(range(batch)))]
    with Calls() as calls:
        logits.append(engine.decode(list(range(3, 3 + batch))))
    return logits, calls.count


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "hunyuan_v1_moe", "gpt_oss"])
@pytest.mark.parametrize("scheme", ["codebook4_g32", "codebook4_g32_int8", "w8a8", "w8a8_rotated_g32"])
def test_norms_of_steps_prepare_tokens_of_experts(
    scheme: str, kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the plain tokens, which the router reads; bitwise as kernels of their own prepare them."""
    as_on_gpus(8 if batch > 1 else 1, monkeypatch)
    model = quantized(kind, scheme, **WIDE, intermediate_size=64, moe_intermediate_size=64).half()
    mixtures = mixtures_of(model)
    layers, shared = len(mixtures), mixtures[0].shared is not None
    logits, calls = counted_steps(model, batch)
    monkeypatch.setattr(Experts, "takes_prepared", lambda self, like: False)
    others, apart = counted_steps(model, batch)
    assert all(map(torch.equal, logits, others))
    assert (calls["plain"], apart["plain"]) == (layers, 0)
    if scheme == "w8a8":
        assert calls["quantize_per_token"] == layers  # of the activation
        assert apart["quantize_per_token"] == 2 * layers
        assert (calls["w8a8_linear"], apart["w8a8_linear"]) == (0, layers if shared else 0)
    elif scheme == "w8a8_rotated_g32":
        kernels = ("quantize_rotated", "w8a8_rotated_linear")  # the second takes one token
        assert sum(apart[name] - calls[name] for name in kernels) == layers * (2 if shared else 1)
        assert calls["activate_rotated"] == apart["activate_rotated"] >= layers  # activations of experts rotate, too
    else:
        assert (calls["rotate_routes"], apart["rotate_routes"]) == (0, layers)
        assert (calls["rotate_tokens"] < apart["rotate_tokens"]) is (shared and batch > 1)
        assert (calls["early"], apart["early"]) == (layers, 2 * layers)


@pytest.mark.parametrize(("tokens", "size"), [(64, 128), (66, 8)])
def test_tokens_of_many_routes_are_rotated_apart(tokens: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of tiles, or of a prompt."""
    as_on_gpus(size, monkeypatch)
    model = quantized("qwen3_moe", "codebook4_g32", **WIDE, moe_intermediate_size=64).half()
    layers, engine = len(mixtures_of(model)), Engine(model, batch=2)
    prompts = prompts_of(VOCABULARY, tokens // 2, tokens // 2)
    with Calls() as calls:
        logits = engine.prefill(prompts)
    assert calls.count["plain"] == (layers if tokens == 64 else 0)
    assert calls.count["rotate_routes"] == (2 * layers if size == 128 else layers)
    monkeypatch.setattr(Experts, "takes_prepared", lambda self, like: False)
    assert torch.equal(Engine(model, batch=2).prefill(prompts), logits)


@pytest.mark.parametrize("scheme", ["codebook4_g32", "w8a8"])
def test_results_are_added_by_the_next_norm(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except those of the last block, and of blocks with shared experts."""
    as_on_gpus(8, monkeypatch)
    model = quantized("qwen3_moe", scheme, **WIDE, moe_intermediate_size=64).half()
    layers = len(mixtures_of(model))
    logits, calls = counted_steps(model, 3)
    ended = Block._ended
    monkeypatch.setattr(Block, "_ended", lambda self, norm, branch: ended(self, norm, experts.summed(branch)))
    others, apart = counted_steps(model, 3)
    assert all(map(torch.equal, logits, others))
    assert (calls["routed"], calls["sum_routes"]) == (layers - 1, 1)
    assert (apart["routed"], apart["sum_routes"]) == (0, layers)
    shared = counted_steps(quantized("qwen2_moe", scheme, **WIDE, moe_intermediate_size=64).half(), 3)[1]
    assert shared["routed"] == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("scheme", "activated", "rotated"),
    [
        ("w8a8", ("silu_mul",), ()),
        ("codebook4_g64", ("activate_rotated",), ("add_norm_rotated",)),
        ("codebook4", ("silu_mul", "rotate_routes"), ("rotate_routes",)),
        ("mxfp4", ("silu_mul", "rotate_routes"), ("rotate_routes",)),
    ],
)
def test_clamped_gates_are_computed_by_kernels(
    scheme: str, activated: tuple[str, ...], rotated: tuple[str, ...], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of 192 columns, which end in a part of a group of 128 as the 2,880 of GPT-OSS do."""
    model = quantized("gpt_oss", scheme, **(WIDE | {"hidden_size": 192, "intermediate_size": 192})).half()
    layers = len(mixtures_of(model))
    as_on_gpus(8 if batch > 1 else 1, monkeypatch)
    monkeypatch.setattr(Gating, "__call__", None)
    _, calls = counted_steps(model, batch)
    wanted = Counter((*activated, *rotated) * layers)
    names = ("silu_mul", "activate_rotated", "rotate_routes", "add_norm_rotated")
    attention = layers if rotated == ("add_norm_rotated",) and batch > 1 else 0  # its norms rotate, too
    wanted["add_norm_rotated"] += attention
    assert {name: calls[name] for name in names} == {name: wanted[name] for name in names}


def test_kernels_of_clamped_gates_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 gates, rounded twice or once, before int8 tokens: a code in a thousand may be the next one."""
    model, prompts = quantized("gpt_oss", "w8a8"), prompts_of(VOCABULARY, 19, 4)
    want = Engine(model, batch=2).prefill(prompts)
    as_on_gpus(8, monkeypatch)
    got = Engine(model, batch=2).prefill(prompts)
    assert (got - want).abs().max() <= 1e-2 * want.abs().max()


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
