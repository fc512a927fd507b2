"""Curvatures of layers: the definition on both losses, what is left as it was, refusals, and what quantize does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.calibration import curvature as module
from qcut.conversion.calibration.curvature import OUTPUT_LIMIT, collect_curvature
from qcut.errors import CalibrationError, ConfigError
from qcut.numerics.codebook.fitting.curvature import Curvature
from tests.support.oracles import normal


class Net(nn.Module):
    """Two layers; returns logits, or a tensor."""

    def __init__(self, logits: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.logits = nn.Linear(12, 20), nn.Linear(20, 8), logits

    def forward(self, x: Tensor) -> Any:
        y = self.down(self.up(x).relu())
        return SimpleNamespace(logits=y) if self.logits else y


def net(logits: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(logits)


def test_curvatures_are_those_of_the_expected_loss():
    model = net()
    # Many tokens of one input: drawn labels give the expectation, which is known exactly.
    x = normal(1, 12)
    found = collect_curvature(model, [x.expand(4000, 12)] * 5, progress=False)
    assert list(found) == ["up", "down"]
    hidden = model.up(x).detach().requires_grad_(True)
    logits = model.down(hidden.relu())
    p = logits.detach().softmax(-1)[0]
    fisher = p.diag() - p[:, None] * p
    jacobian = torch.stack([torch.autograd.grad(logits[0, i], hidden, retain_graph=True)[0][0] for i in range(8)])
    for name, inputs, outputs in (
        ("down", hidden.relu().detach(), fisher),
        ("up", x, jacobian.t() @ fisher @ jacobian),
    ):
        scale = module._SCALE**2
        got = found[name].outputs
        assert got is not None
        torch.testing.assert_close(got / scale, outputs, rtol=0, atol=0.03 * float(outputs.abs().max()))
        want = inputs.t() @ inputs * outputs.trace()
        torch.testing.assert_close(found[name].inputs / scale, want, rtol=0, atol=0.03 * float(want.abs().max()))


def test_tokens_that_the_loss_feels_weigh_more():
    model = net(logits=False)
    with torch.no_grad():
        model.down.weight[:, 10:] = 0  # half of the hidden units do not matter
    x = normal(6, 50, 12)
    found = collect_curvature(model, list(x), progress=False)["up"]
    assert found.outputs is not None
    assert not found.outputs[10:].any()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.zeros(12, 12)
    for batch in x:
        slope = torch.randn(50, 8, generator=generator) * module._SCALE
        g = (slope @ model.down.weight.detach()) * (model.up(batch) > 0)
        inputs += batch.t() @ (batch * g.square().sum(1, keepdim=True))
    torch.testing.assert_close(found.inputs, inputs / 300, rtol=1e-4, atol=1e-4 * float(inputs.max()) / 300)


def test_the_model_is_left_as_it_was():
    model = net().train()
    model.up.bias.requires_grad_(False)
    model.down.weight.grad = torch.ones(8, 20)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        first = collect_curvature(model, [normal(9, 12)], progress=False)
    again = collect_curvature(model, [normal(9, 12)], progress=False)
    assert model.training
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
    assert torch.equal(model.down.weight.grad, torch.ones(8, 20))
    assert model.up.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.up._forward_hooks
    for name in first:
        assert torch.equal(first[name].inputs, again[name].inputs)
        assert not first[name].inputs.requires_grad
    other = collect_curvature(model, [normal(9, 12)], seed=1, progress=False)
    assert not torch.equal(first["up"].inputs, other["up"].inputs)


def test_large_layers_have_no_outputs():
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, OUTPUT_LIMIT + 1))
    found = collect_curvature(model, [normal(9, 12)], progress=False)
    assert found["0"].outputs is not None
    assert found["1"].outputs is None


def test_what_is_refused():
    model = net()
    with pytest.raises(CalibrationError, match="found none"):
        collect_curvature(model, [], progress=False)
    with pytest.raises(ConfigError, match="loss: found 'labels'"):
        collect_curvature(model, [normal(9, 12)], loss="labels", progress=False)
    with pytest.raises(CalibrationError, match=r"layer 'up': found NaN or Inf"):
        collect_curvature(model, [torch.full((2, 12), torch.nan)], progress=False)
    model.more = nn.Linear(12, 12)
    with pytest.raises(CalibrationError, match=r"'more' saw no derivative of the loss in 1 batches"):
        collect_curvature(model, [normal(9, 12)], progress=False)
    assert list(collect_curvature(model, [normal(9, 12)], skip=["more"], progress=False)) == ["up", "down"]
    assert not model.down._forward_hooks


def test_quantize_fits_to_curvature():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96, bias=False), nn.Linear(96, 8, bias=False)).requires_grad_(False)
    model[1].weight *= torch.logspace(0, -2, 96)  # hidden units differ in what they matter
    mixed = normal(512, 128) @ (normal(128, 128, seed=2) * torch.logspace(0, -2, 128)[:, None])
    options = {"include": ["0"], "allow_growth": True, "progress": False}
    curvature = collect_curvature(model, [mixed], layers=["0"], loss="outputs", progress=False)
    moments = qcut.collect_second_moments(model, [mixed], layers=["0"], progress=False)
    errors = []
    for given in (curvature, moments, None):
        other = copy.deepcopy(model)
        qcut.quantize(other, "codebook4", second_moments=given, **options)
        errors.append(float((other(mixed) - model(mixed)).square().mean()))
    assert errors[0] < 0.5 * errors[1] < 0.25 * errors[2]
    wrong = {"0": Curvature(curvature["0"].inputs, torch.eye(3))}
    with pytest.raises(CalibrationError, match=r"derivatives by its outputs has shape \[3, 3\]; allowed: \[96, 96\]"):
        qcut.quantize(model, "codebook2", second_moments=wrong, **options)


def test_smoothing_divides_the_inputs():
    curvature = Curvature(normal(4, 4), normal(3, 3))
    scale = torch.tensor([1.0, 2.0, 0.5, 4.0])
    divided = curvature.divided(scale)
    torch.testing.assert_close(divided.inputs, torch.diag(1 / scale) @ curvature.inputs @ torch.diag(1 / scale))
    assert divided.outputs is curvature.outputs
