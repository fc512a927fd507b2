"""Batches in every form that Python iterates over, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import qcut
from qcut.errors import ConfigError, QcutError

ROWS = torch.linspace(-2.0, 2.0, 6 * 32).view(6, 32)


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).eval()


def refined(batches: Any) -> None:
    model = net()
    qcut.quantize(model, "codebook3_g16", allow_growth=True, progress=False)
    qcut.refine(model, net(), batches, steps=2, progress=False)


USES: dict[str, Callable[[Any], object]] = {
    "calibrate": lambda batches: qcut.calibrate(net(), batches, progress=False),
    "moments": lambda batches: qcut.collect_second_moments(net(), batches, progress=False),
    "curvature": lambda batches: qcut.collect_curvature(net(), batches, progress=False),
    "plan": lambda batches: qcut.plan(net(), batches, budget=1.0, candidates=["w8a8", "fp16"], progress=False),
    "refine": refined,
    "chain": lambda batches: qcut.IntegerChain.from_float(net(), batches),
}


def generated() -> Iterator[Tensor]:
    yield from ROWS.split(2)


FORMS: dict[str, Callable[[], Any]] = {
    "generator": generated,
    "iterator": lambda: iter(ROWS.split(2)),
    "map": lambda: map(torch.Tensor.clone, ROWS.split(2)),
    "loader": lambda: DataLoader(ROWS, batch_size=2),
    "tuple": lambda: ROWS.split(2),
    "tensor": lambda: ROWS.view(3, 2, 32),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", FORMS)
def test_any_iterable_serves(use: str, form: str) -> None:
    USES[use](FORMS[form]())


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "batches",
    [None, 3, "text", {"x": ROWS}, [], (), iter(())],
    ids=["none", "number", "text", "dict", "list", "tuple", "iterator"],
)
def test_what_is_no_batches_is_refused_in_words(use: str, batches: Any) -> None:
    with pytest.raises(QcutError, match="batch"):
        USES[use](batches)


def test_one_use_iterators_are_read_once() -> None:
    taken = []
    calibration = qcut.calibrate(net(), (taken.append(len(b)) or b for b in ROWS.split(2)), progress=False)
    assert taken == [2, 2, 2]
    assert calibration.layers["0"].tokens == 6


ARGUMENTS: tuple[tuple[str, Any], ...] = (
    *((name, value) for name in ("seed", "sample_size", "sensitivity_batches") for value in ("x", 1.5, True, 1 << 70)),
    *(
        (name, value)
        for name in ("most_bytes", "prior", "quantile", "cost", "candidates")
        for value in ("x", True + 2j)
    ),
    ("seed", None),
    ("candidates", 3),
)
TAKE = {
    "calibrate": ("seed", "sample_size", "quantile"),
    "moments": ("most_bytes", "prior"),
    "curvature": ("most_bytes", "prior", "seed"),
    "plan": ("sensitivity_batches", "cost", "candidates"),
    "refine": ("seed",),
}
CALLS: dict[str, Callable[..., object]] = {
    "calibrate": qcut.calibrate,
    "moments": qcut.collect_second_moments,
    "curvature": qcut.collect_curvature,
    "plan": qcut.plan,
    "refine": lambda model, batches, **options: qcut.refine(model, net(), batches, **options),
}


@pytest.mark.parametrize(
    ("use", "name", "value"),
    [(use, name, value) for use, names in TAKE.items() for name, value in ARGUMENTS if name in names],
)
def test_arguments_of_other_types_are_refused(use: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}(: found| is) "):
        CALLS[use](net(), ROWS.split(2), progress=False, **{name: value})
