"""State of modules besides parameters and buffers is kept or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import CheckpointError


class Counted(nn.Linear):
    """A linear layer with a state of its own."""

    calls = 3

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Masked(nn.Linear):
    """A linear layer with a buffer next to its weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones(4), persistent=False)


@pytest.mark.parametrize(("cls", "what"), [(Counted, "get_extra_state"), (Masked, "mask")])
def test_layers_with_more_than_a_weight_stay(cls: type[nn.Linear], what: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), cls(64, 64))
    with pytest.warns(qcut.errors.QuantizationWarning, match=what):
        report = qcut.quantize(model, "w8a8", progress=False)
    assert what in report.skipped["1"]
    assert type(model[1]) is cls


def test_extra_state_is_not_saved_silently(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Counted(64, 64)))
    qcut.quantize(model, "w8a8", include=["0"], progress=False)
    with pytest.raises(CheckpointError, match=r"'1\.0' \(Counted\) has extra state"):
        qcut.save(model, tmp_path)
    assert not list(tmp_path.glob("*"))


def test_buffers_outside_the_state_dict_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), Masked(64, 64))
    qcut.quantize(model, "w8a8", include=["0"], progress=False)
    model[1].mask.mul_(5)
    qcut.save(model, tmp_path)
    again = qcut.load(tmp_path, model=lambda: nn.Sequential(nn.Linear(64, 64), Masked(64, 64)), progress=False)
    assert torch.equal(again[1].mask, model[1].mask)
