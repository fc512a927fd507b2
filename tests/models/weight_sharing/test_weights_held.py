"""Weights that code reads by way of plain data stay in float."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcut


class Held(nn.Module):
    """Two layers; the weight of the second is read as subclasses keep it."""

    kept: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.keep()
        self.eval()

    def keep(self) -> None:
        """Keep the weight somewhere."""

    def read(self, x: Tensor) -> Tensor:
        return self.second(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(F.gelu(self.first(x)))


class InList(Held):
    def keep(self) -> None:
        self.kept = [self.second.weight]

    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0])


class Detached(InList):
    def keep(self) -> None:
        self.kept = {0: self.second.weight.detach()}


class Transposed(Held):
    def keep(self) -> None:
        self.kept = self.second.weight.data.t()

    def read(self, x: Tensor) -> Tensor:
        return x @ self.kept


class InPartial(Held):
    def keep(self) -> None:
        self.kept = functools.partial(F.linear, weight=self.second.weight)

    def read(self, x: Tensor) -> Tensor:
        return self.kept(x)


class InClosure(InPartial):
    def keep(self) -> None:
        weight = self.second.weight
        self.kept = lambda x: F.linear(x, weight)


class InBuffer(Transposed):
    def keep(self) -> None:
        self.register_buffer("kept", self.second.weight.data)

    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept)


class ForAnOptimizer(Held):
    def keep(self) -> None:
        self.trained = [*self.parameters()]

    def optimizer(self) -> Any:
        return torch.optim.SGD(self.trained)


@pytest.mark.parametrize("kind", [InList, Detached, Transposed, InPartial, InClosure, InBuffer])
def test_weight_that_code_reads_stays(kind: type[Held]) -> None:
    model = kind()
    report = qcut.quantize(model, "w8a8", progress=False)
    assert [*report.schemes] == ["first"]
    assert "kept" in report.skipped["second"] or report.skipped["second"] == "its weight is tied to ''"
    assert type(model.second) is nn.Linear


def test_weights_that_no_call_reads_are_quantized() -> None:
    assert [*qcut.quantize(ForAnOptimizer(), "w8a8", progress=False).schemes] == ["first", "second"]
