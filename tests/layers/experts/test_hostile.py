"""Experts that compute something else than their class and flags say stay in float, and are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcut
from qcut.errors import QuantizationError, QuantizationWarning
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.opening import opened
from qcut.layers.experts.weights import open_experts
from tests.layers.experts.classes import EXPERTS, HIDDEN, WIDTH, Holder, class_of, mixture_classes, routes, tiny_experts
from tests.layers.experts.stacks import Routed

pytest.importorskip("transformers")

OSS = "gpt_oss.modeling_gpt_oss:GptOssExperts"
MIXTRAL = "mixtral.modeling_mixtral:MixtralExperts"
LLAMA4 = "llama4.modeling_llama4:Llama4TextExperts"
DBRX = "dbrx.modeling_dbrx:DbrxExperts"
UNKNOWN = "is no class whose experts qcut knows"
OTHER = "computes something else than its weights and flags say"
WATCHED = "has hooks, or a forward of its own"


class Mixture(nn.Module):
    """A model with experts, and a linear layer that can be quantized in any case."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(HIDDEN, HIDDEN), experts

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.first(x), *routes(len(x)))
        return y


def reason_of(module: nn.Module) -> str:
    """Why experts stay in float; everything about them is as before."""
    model = Mixture(module)
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with pytest.warns(QuantizationWarning, match="experts"):
        report = qcut.quantize(model, "w8a8", verify=False, progress=False)
    assert [layer.name for layer in report.layers] == ["first"]
    assert list(report.skipped) == ["experts"]
    assert model.experts is module
    assert all(torch.equal(tensor, state[key]) for key, tensor in module.state_dict().items())
    assert report.skipped["experts"] in str(report)
    return report.skipped["experts"]


def subclass_of(name: str, **members: Any) -> nn.Module:
    module = tiny_experts(name)
    module.__class__ = type("Patched", (type(module),), members)
    return module


def no_limit(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2], rows[..., 1::2]
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


@pytest.mark.parametrize("name", [MIXTRAL, OSS, LLAMA4, DBRX])
def test_subclasses_are_left(name: str) -> None:
    assert UNKNOWN in reason_of(subclass_of(name))
    assert UNKNOWN in reason_of(subclass_of(name, forward=lambda self, x, *_: x))
    assert UNKNOWN in reason_of(subclass_of(name, _apply_gate=no_limit))


@pytest.mark.parametrize("name", [MIXTRAL, OSS])
def test_another_forward_of_the_class_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, cls = tiny_experts(name), class_of(name)
    monkeypatch.setattr(cls, "forward", lambda self, x, *_: x)
    assert UNKNOWN in reason_of(module)


def test_another_gate_of_the_class_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is what calling it gives, in any class."""
    module = tiny_experts(OSS)
    monkeypatch.setattr(class_of(OSS), "_apply_gate", no_limit)
    made = open_experts(module)
    assert isinstance(made, Experts)
    assert (made.gating.alpha, made.gating.limit, made.gating.plus_one) == (1.702, None, True)
    monkeypatch.setattr(class_of(OSS), "_apply_gate", lambda self, rows: torch.sin(rows[..., ::2]) * rows[..., 1::2])
    assert "has a gate that qcut does not know" in reason_of(module)
    monkeypatch.setattr(class_of(OSS), "_apply_gate", lambda self, rows: rows / 0)
    assert "has a gate that qcut does not know" in reason_of(module)


def hook(module: Any, *_: Any) -> None:
    return None


@pytest.mark.parametrize("name", [MIXTRAL, LLAMA4, DBRX])
@pytest.mark.parametrize(
    "watch",
    [
        lambda m: m.register_forward_hook(hook),
        lambda m: m.register_forward_pre_hook(hook),
        lambda m: m.register_full_backward_hook(hook),
        lambda m: setattr(m, "forward", lambda x, *_: x),
        lambda m: next(iter(list(m.modules())[1:])).register_forward_hook(hook),
    ],
)
def test_watched_experts_are_left(name: str, watch: Callable[[Any], Any]) -> None:
    module = tiny_experts(name)
    watch(module)
    assert WATCHED in reason_of(module)


class ReadsMatrices(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.experts.down_proj.norm()  # type: ignore[operator]


class ReadsSize(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.experts.intermediate_dim  # type: ignore[operator]


class AsksClass(Mixture):
    kind = nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if isinstance(self.experts, self.kind) else 1)


class Holds(Mixture):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__(experts)
        self.again = [experts]


class ReadsNumber(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.experts.num_experts  # type: ignore[operator]


@pytest.mark.parametrize("cls", [ReadsMatrices, ReadsSize, AsksClass, Holds])
def test_experts_used_otherwise_are_left(cls: type[Mixture]) -> None:
    experts = tiny_experts(MIXTRAL)
    AsksClass.kind = type(experts)
    model, x = cls(experts), torch.randn(6, HIDDEN)
    want = model(x)
    with pytest.warns(QuantizationWarning, match="experts"):
        report = qcut.quantize(model, "int16x8", verify=False, progress=False)
    assert cls.__name__ in report.skipped["experts"]
    torch.testing.assert_close(model(x), want, rtol=0.1, atol=0.05 * float(want.detach().abs().max()))


def test_experts_of_a_known_number_are_quantized() -> None:
    model = ReadsNumber(tiny_experts(MIXTRAL))
    report = qcut.quantize(model, "w8a8", verify=False, progress=False)
    assert {layer.name for layer in report.layers} == {"first", "experts.up", "experts.down"}


def eager(self: Any, x: Tensor, index: Tensor, weights: Tensor, gate: Any = None) -> Tensor:
    """The right result, by another way."""
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for r in range(index.shape[1]):
            e = index[t, r]
            rows = F.linear(x[t], self.gate_up_proj[e])
            rows = self._apply_gate(rows[None])[0] if gate is None else gate(rows)
            y[t] += weights[t, r] * F.linear(rows, self.down_proj[e])
    return y


def clipped(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A limit that the module's own gate does not have."""

    def gate(rows: Tensor) -> Tensor:
        g, u = rows.chunk(2, -1)
        return F.silu(g.clamp(max=7.0)) * u

    return eager(self, x, index, weights, gate)


def fails(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    raise RuntimeError("needs a GPU\nof the newest kind")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (eager, None),
        (lambda *args: eager(*args) * 1.01, OTHER),
        (lambda self, x, index, weights: eager(self, x, index, weights.softmax(1)), OTHER),
        (lambda self, x, index, weights: eager(self, x, index.flip(1), weights), OTHER),
        (lambda self, x, index, weights: eager(self, x, index, weights)[:, :8], OTHER),
        (lambda self, x, index, weights: eager(self, x, index, weights) * torch.nan, OTHER),
        (clipped, OTHER),
        (fails, "MixtralExperts fails on random tokens: needs a GPU of the newest kind"),
    ],
)
def test_registered_implementations(function: Any, reason: str | None) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    module = tiny_experts(MIXTRAL)
    module.config._experts_implementation = "of_the_test"
    ALL_EXPERTS_FUNCTIONS.register("of_the_test", function)
    try:
        found = open_experts(module)
        assert isinstance(found, Experts) if reason is None else reason in found  # type: ignore[operator]
        assert reason is None or reason in reason_of(module)
    finally:
        del ALL_EXPERTS_FUNCTIONS._global_mapping["of_the_test"]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", [MIXTRAL, OSS])
def test_implementations_of_transformers_are_opened(name: str, implementation: str, dtype: torch.dtype) -> None:
    module = tiny_experts(name).to(dtype)
    module.config._experts_implementation = implementation
    found = open_experts(module)
    if (implementation, dtype) == ("grouped_mm", torch.float64):
        assert "fails on random tokens: Expected mat_a to be" in str(found)
    else:
        assert isinstance(found, Experts)


def test_parallel_experts_skip_foreign_routes() -> None:
    module = tiny_experts(MIXTRAL)
    module._is_expert_parallel = True
    module.config._experts_implementation = "grouped_mm"
    model, x = Holder(copy.deepcopy(module)), torch.randn(9, HIDDEN)
    qcut.quantize(model, "w8a16", verify=False, progress=False)
    index, weights = (t.clone() for t in routes(9))
    index[::2, 0], weights[::2, 0] = EXPERTS, 0.0
    index[4], weights[4] = EXPERTS, 0.0
    with torch.no_grad():
        got, want = model(x, index, weights), module(x, index, weights)
    assert not got[4].any()
    assert ((got - want).norm() / want.norm()).item() < 0.05


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_name_the_expert(part: str, value: float) -> None:
    for e in range(EXPERTS):
        module = tiny_experts(MIXTRAL)
        with torch.no_grad():
            getattr(module, part)[e, 3, 5] = value
        layer = rf"experts\.{'up' if part == 'gate_up_proj' else 'down'}\.{e}"
        with pytest.raises(QuantizationError, match=f"{layer}': weight holds NaN or Inf"):
            qcut.quantize(Holder(module), "w8a8", verify=False, progress=False)


def changed(name: str, change: Callable[[Any], Any]) -> nn.Module:
    module = tiny_experts(name)
    change(module)
    return module


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(2))), "its flags ask for"),
        (lambda m: m.register_buffer("scale", torch.ones(1)), "its flags ask for"),
        (lambda m: setattr(m, "has_bias", True), "its flags ask for"),
        (lambda m: setattr(m, "is_transposed", True), "do not fit together"),
        (lambda m: setattr(m, "is_concatenated", False), "has a gate that qcut does not know"),
        (lambda m: setattr(m, "has_gate", None), "its flags ask for"),
        (lambda m: delattr(m, "has_gate"), "is not laid out as its class is"),
        (lambda m: setattr(m, "down_proj", nn.Parameter(torch.zeros(3, HIDDEN, WIDTH))), "do not fit together"),
        (lambda m: setattr(m, "down_proj", nn.Parameter(torch.zeros(EXPERTS, HIDDEN * WIDTH))), "2 dimensions"),
        (lambda m: m.to(torch.float8_e4m3fn), "no plain tensors of floating point"),
        (lambda m: setattr(m, "act_fn", nn.Tanh()), "has a gate that qcut does not know"),
        (lambda m: setattr(m, "config", object()), "fails on random tokens"),
    ],
)
def test_experts_that_are_not_as_their_class(change: Callable[[Any], Any], reason: str) -> None:
    assert reason in reason_of(changed(MIXTRAL, change))


def test_other_activations_are_found() -> None:
    for act, kind in ((nn.GELU(), "gelu_erf"), (nn.ReLU(), "relu"), (nn.Identity(), "none"), (nn.SiLU(), "silu")):
        made = open_experts(changed(MIXTRAL, lambda m, act=act: setattr(m, "act_fn", act)))
        assert isinstance(made, Experts)
        assert made.gating.kind == kind


# ── mixtures of one's own ────────────────────────────────────────────────────────────────────────


class OwnMoE(nn.Module):
    """Experts in parameters of three dimensions, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        scores = self.router(x).softmax(-1)
        return torch.einsum("te,tei->ti", scores, torch.relu(x @ self.w1).transpose(0, 1) @ self.w2)


class ListMoE(nn.Module):
    """Experts that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        y: Tensor = torch.stack([scores[:, e, None] * one(x) for e, one in enumerate(self.experts)]).sum(0)
        return y


def test_plain_parameters_of_ones_own_are_left() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), OwnMoE())
    with pytest.warns(QuantizationWarning, match="OwnMoE is no class whose experts qcut knows"):
        report = qcut.quantize(model, "w8a8", allow_growth=True, verify=False, progress=False)
    assert [layer.name for layer in report.layers] == ["0"]
    assert UNKNOWN in report.skipped["1"]
    assert "a router, with an output for each of 4 experts" in report.skipped["1.router"]
    assert report.percent["experts"] > 50


def test_modules_of_ones_own_are_quantized() -> None:
    model = ListMoE()
    report = qcut.quantize(model, "w8a8", verify=False, progress=False)
    assert [layer.name for layer in report.layers] == [f"experts.{e}" for e in range(EXPERTS)]
    assert report.skipped == {"gate": "a router, with an output for each of 4 experts"}


def test_a_failure_inside_closes_the_experts() -> None:
    model = Holder(tiny_experts(MIXTRAL))
    before = model.experts
    opening = opened(model)
    opening.__enter__()
    assert isinstance(model.experts, Experts)
    assert not opening.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert model.experts is before


def test_quantized_experts_open_and_close() -> None:
    model = Holder(tiny_experts(MIXTRAL))
    qcut.quantize(model, "codebook4", verify=False, progress=False)
    before, x = model.experts, torch.randn(5, HIDDEN)
    with torch.no_grad():
        want = Routed(before)(x)  # type: ignore[arg-type]
        with opened(model) as mixtures:
            assert sorted(mixtures.stacks()) == ["experts.down", "experts.up"]
            assert isinstance(model.experts.up, nn.ModuleList)
            assert torch.equal(Routed(model.experts)(x), want)  # type: ignore[arg-type]
    assert model.experts is before


def test_one_module_in_two_places_is_one() -> None:
    experts = tiny_experts(MIXTRAL)
    model = nn.ModuleDict({"a": Holder(experts), "b": Holder(experts)})
    report = qcut.quantize(model, "w8a8", verify=False, progress=False)
    assert model["a"].experts is model["b"].experts
    assert [layer.name for layer in report.layers] == ["a.experts.up", "a.experts.down"]


def test_all_names_of_this_file_exist() -> None:
    assert {OSS, MIXTRAL, LLAMA4, DBRX} <= set(mixture_classes())
