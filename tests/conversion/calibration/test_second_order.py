"""What a backward pass foretells is near what quantizing a layer does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qcut.conversion.calibration.calibrate import calibrate
from qcut.conversion.calibration.second_order import channel_weights, expected_loss
from qcut.conversion.planning.sensitivity import Judge
from qcut.errors import CalibrationError
from qcut.layers.linear import Linear
from qcut.models.selection import find_layers
from tests.support.zoo import same, snapshot, tiny_lm, token_batches


def test_estimates_order_layers_as_measurements_do() -> None:
    model, batches = tiny_lm(), token_batches(8)
    layers = find_layers(model)
    before = snapshot(model)
    judge = Judge(model, batches, False)
    weights = channel_weights(model, batches, layers, judge.metric, progress=False)
    assert same(before, snapshot(model))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    calibration = calibrate(model, batches, progress=False)
    made = {name: Linear.from_float(module, "int2_g16") for name, module in layers.items()}
    measured = judge.losses([{name: layer} for name, layer in made.items()], "x")
    estimates = [expected_loss(layers[n], made[n], calibration.stats(n).sample, weights[n]) for n in made]
    ratios = [math.expm1(estimate) / loss for estimate, loss in zip(estimates, measured, strict=True)]
    assert all(0.2 < ratio < 5 for ratio in ratios), ratios
    worst = max(range(len(made)), key=measured.__getitem__)
    assert estimates[worst] > 0.5 * max(estimates)


def test_output_errors_are_predicted_without_tokens() -> None:
    """The last layer's own squared error is the loss itself, whatever is drawn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    batches = [torch.randn(512, 16)]
    weights = channel_weights(model, batches, find_layers(model), "output error", progress=False)
    layer, sample = Linear.from_float(model[2], "int3_g16"), torch.relu(model[0](batches[0])).detach()
    want = Judge(model, batches, False).losses([{"2": layer}], "x")[0]
    assert expected_loss(model[2], layer, sample, weights["2"]) == pytest.approx(want, rel=0.25)


def test_a_layer_without_gradients_is_named() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.unseen = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.seen(x) + self.unseen(x).detach()

    model = Cut()
    with pytest.raises(CalibrationError, match=r"'unseen'.*found none"):
        channel_weights(model, [torch.randn(2, 4)], find_layers(model), "output error", progress=False)
