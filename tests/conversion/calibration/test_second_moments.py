"""Second moments of layers' inputs: the definition, shared matrices, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qcut.conversion.calibration.second_moments import collect_second_moments
from qcut.errors import CalibrationError
from tests.support.oracles import normal


class Block(nn.Module):
    """Two layers on one input, one on the product of theirs, like a gated MLP."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.gate(x).relu() * self.up(x))
        return self.up(y) if self.again else y


class Half(nn.Sequential):
    """Runs its first layer only."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def test_second_moments_are_those_of_the_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    batches = [normal(3, 5, 12, seed=i) for i in range(3)]
    moments = collect_second_moments(model, batches, progress=False)
    x = torch.cat([batch.flatten(0, 1) for batch in batches])
    assert sorted(moments) == sorted(f"{i}.{name}" for i in range(2) for name in ("down", "gate", "up"))
    for i, block in enumerate(model):
        inside = block.gate(x).relu() * block.up(x)
        for name, inputs in (("gate", x), ("up", x), ("down", inside)):
            torch.testing.assert_close(moments[f"{i}.{name}"], inputs.t() @ inputs / 45, rtol=1e-5, atol=1e-6)
        assert moments[f"{i}.gate"] is moments[f"{i}.up"]
        x = block(x)
    only = collect_second_moments(model, batches, layers=["1.up"], progress=False)
    assert list(only) == ["1.up"]
    torch.testing.assert_close(only["1.up"], moments["1.up"])


def test_second_moments_refuse():
    model = Block()
    with pytest.raises(CalibrationError, match="found none"):
        collect_second_moments(model, [], progress=False)
    with pytest.raises(CalibrationError, match=r"'gate'.*NaN or Inf"):
        collect_second_moments(model, [torch.full((1, 12), torch.nan)], progress=False)
    with pytest.raises(CalibrationError, match="'1' saw no token"):
        collect_second_moments(Half(nn.Linear(12, 12), nn.Linear(12, 12)), [normal(2, 12)], progress=False)
    square = Block(again=True)
    with pytest.raises(CalibrationError, match=r"'up' reads the input of 'gate' in some calls.*layers=\['up'\]"):
        collect_second_moments(square, [normal(2, 12)], progress=False)
    assert collect_second_moments(square, [normal(2, 12)], layers=["up"], progress=False)["up"].shape == (12, 12)
