"""Sets of layers are those that the engine stacks, and no others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.fused_projections import fused_projections
from qcut.models.selection import find_layers
from tests.support.decoders import small


def test_they_are_the_engines_projections() -> None:
    for kind, want in (
        ("llama", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]),
        ("gpt2", []),
    ):
        model = small(kind)
        found = fused_projections(model, [torch.arange(8)[None]], find_layers(model))
        names = [tuple(name.rpartition(".")[2] for name in names) for names in found]
        assert names == want * (len(names) // max(1, len(want)))
        assert len(names) == len(want) * model.config.num_hidden_layers


class Odd(nn.Module):
    """Layers that are called with one tensor, and yet are no fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.inner = nn.ModuleDict({"c": nn.Linear(8, 8)})
        self.d, self.e, self.f = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.b(x)
        x = self.inner["c"](x) + self.a(x)
        y = self.d(x) + self.e(x)
        return self.e(y) + self.f(y)


def test_biases_parents_and_second_calls_part_them() -> None:
    model = Odd()
    assert fused_projections(model, [torch.randn(2, 8)], find_layers(model)) == []
    handles = [len(module._forward_pre_hooks) for module in model.modules()]
    assert not any(handles)


class Gated(nn.Module):
    """Comes to its second layer only with some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) if float(x.mean()) > 0 else self.a(x)


def test_any_batch_may_part_them() -> None:
    model, x = Gated(), torch.ones(2, 8)
    assert fused_projections(model, [x, x], find_layers(model)) == [("a", "b")]
    assert fused_projections(model, [x, -x], find_layers(model)) == []
