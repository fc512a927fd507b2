"""Calibration of experts that are modules of their own, some of which see few tokens or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.inventory import FEW_TOKENS
from qcut.errors import CalibrationError
from qcut.numerics.codebook.fitting.curvature import as_curvature

WIDTH, EXPERTS, NEVER = 32, 4, 3
COLLECTORS: list[Any] = [qcut.collect_second_moments, qcut.collect_curvature]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    """The last expert is chosen by no token; with ``idle``, it is called on none."""

    def __init__(self, kind: str = "list", idle: bool = False, experts: str = "experts") -> None:
        super().__init__()
        made = [Expert() for _ in range(EXPERTS)]
        self.gate, self.idle, self.key = nn.Linear(WIDTH, EXPERTS), idle, experts
        of_names = nn.ModuleDict({f"expert_{e}": one for e, one in enumerate(made)})
        setattr(self, experts, nn.ModuleList(made) if kind == "list" else of_names)
        nn.init.constant_(self.gate.bias[NEVER:], -1e4)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e, expert in enumerate(getattr(self, self.key).children()):
            token, route = torch.where(index == e)
            if len(token) or self.idle:
                y.index_add_(0, token, expert(x[token]) * weights[token, route, None])
        return y


def mixture(*args: Any, **options: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(*args, **options).eval()


def batches(tokens: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, WIDTH, generator=generator) for _ in range(3)]


def layer(kind: str, e: int, part: str) -> str:
    return f"experts.{e}.{part}" if kind == "list" else f"experts.expert_{e}.{part}"


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_unseen_experts_borrow_tokens(kind: str, idle: bool) -> None:
    model = mixture(kind, idle)
    found = qcut.calibrate(model, batches(), progress=False)
    up, down = (found.layers[layer(kind, NEVER, part)] for part in ("up", "down"))
    assert found.tokens[layer(kind, NEVER, "up")] == 0
    assert up.borrowed
    assert down.borrowed
    every = torch.cat(batches())
    assert torch.equal(up.lo, every.amin(0))
    assert torch.equal(up.hi, every.amax(0))
    expert = model.get_submodule(layer(kind, NEVER, "up").removesuffix(".up"))
    with torch.no_grad():
        torch.testing.assert_close(down.sample, expert.up(up.sample).relu())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_experts_with_enough_tokens_keep_theirs() -> None:
    model = mixture()
    few, many = (qcut.calibrate(model, batches(tokens), progress=False) for tokens in (24, 3000))
    assert 0 < few.tokens[layer("list", 0, "up")] < FEW_TOKENS < many.tokens[layer("list", 0, "up")]
    assert few.layers[layer("list", 0, "up")].borrowed
    assert not many.layers[layer("list", 0, "up")].borrowed
    assert many.layers[layer("list", NEVER, "down")].borrowed


@pytest.mark.parametrize("scheme", ["w8a8_static", "int16x8_static", "fp8_static"])
def test_static_schemes_of_unseen_experts(scheme: str) -> None:
    model, x = mixture(), torch.cat(batches())
    calibration = qcut.calibrate(model, batches(), progress=False)
    expert = model.get_submodule(f"experts.{NEVER}")
    with torch.no_grad():
        wanted = expert(x)
        report = qcut.quantize(model, scheme, calibration=calibration, progress=False)
        assert float((expert(x) - wanted).norm() / wanted.norm()) < 0.1
    few = {one.name for one in report.layers if one.few_tokens}
    assert few == {layer("list", NEVER, part) for part in ("up", "down")}
    assert "saw no token in calibration" in str(report)


@pytest.mark.parametrize("most_bytes", [None, 5000.0])
@pytest.mark.parametrize("collect", COLLECTORS)
def test_moments_of_unseen_experts_are_identities(collect: Any, most_bytes: float | None) -> None:
    fitted, rounded = mixture(), mixture()
    moments = collect(fitted, batches(), most_bytes=most_bytes, progress=False)
    for part, (n, k) in (("up", (64, WIDTH)), ("down", (WIDTH, 64))):
        found = as_curvature(moments[layer("list", NEVER, part)])
        assert torch.equal(found.inputs, torch.eye(k))
        assert found.outputs is None or torch.equal(found.outputs, torch.eye(n))
        assert not torch.equal(as_curvature(moments[layer("list", 0, part)]).inputs, torch.eye(k))
    reports = (
        qcut.quantize(fitted, "codebook4_g32", second_moments=moments, progress=False),
        qcut.quantize(rounded, "codebook4_g32", progress=False),
    )
    errors = [next(one.weight_error for one in r.layers if one.name == layer("list", NEVER, "up")) for r in reports]
    assert errors[0] <= errors[1]
    assert moments.tokens[layer("list", NEVER, "up")] == 0


@pytest.mark.parametrize("collect", [*COLLECTORS, qcut.calibrate])
def test_layers_without_any_token_are_an_error(collect: Any) -> None:
    for model in (mixture(), mixture(experts="branches")):
        if model.key == "experts":
            model.forward = model.gate.forward  # type: ignore[method-assign]
        with pytest.raises(CalibrationError, match=rf"layer '{model.key}\.\d\.up' saw no"):
            collect(model, batches(), progress=False)


def test_failing_experts_without_tokens_are_an_error() -> None:
    model = mixture()
    model.get_submodule(f"experts.{NEVER}").up.forward = lambda: None  # type: ignore[union-attr]
    with pytest.raises(CalibrationError, match=rf"layer 'experts\.{NEVER}\.down' saw no token"):
        qcut.calibrate(model, batches(), progress=False)
