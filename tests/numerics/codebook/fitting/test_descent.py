"""Coordinate descent of indices and least squares of scales: neither raises the error, and both reach optima."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qcut.numerics.codebook import lloyd_max, rotation
from qcut.numerics.codebook.fitting import descent
from qcut.numerics.codebook.fitting.feedback import by_columns, unit_factor
from tests.numerics.codebook.fitting.test_feedback import given, metric
from tests.support.oracles import normal

N, K, SIZE = 20, 96, 32
PARTS = rotation.groups(K, SIZE)


def loss(w: Tensor, indices: Tensor, scales: Tensor, h: Tensor, g: Tensor, bits: int) -> Tensor:
    """``diag(G E H E^T)`` in float64."""
    e = (w - lloyd_max.codebook(bits)[indices.int()] * scales.repeat_interleave(SIZE, 1)).double()
    return ((g.double() @ e @ h.double()) * e).sum(1)


def start(bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w, h = normal(N, K), metric(K)
    u = unit_factor(h)
    assert u is not None
    indices, scales = (one[0] for one in by_columns(w[None], u[None], lloyd_max.codebook(bits), PARTS))
    return w, h, indices, scales


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("rows", ["alone", "together"])
def test_indices_and_scales_lower_the_error(rows: str, bits: int):
    w, h, indices, scales = start(bits)
    g = None if rows == "alone" else metric(N, seed=2)
    weights = torch.eye(N) if g is None else g
    values = lloyd_max.codebook(bits)
    errors = [loss(w, indices, scales, h, weights, bits).sum()]
    for _ in range(3):
        indices = descent.indices(*given(w, indices, scales, h), None if g is None else g[None], values, PARTS)[0]
        errors.append(loss(w, indices, scales, h, weights, bits).sum())
        scales = descent.scales(w, indices, scales, h, g, values, PARTS)
        errors.append(loss(w, indices, scales, h, weights, bits).sum())
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]


def test_no_single_index_could_be_better():
    w, h, indices, scales = start(3)
    values = lloyd_max.codebook(3)
    for _ in range(30):
        before, indices = indices, descent.indices(*given(w, indices, scales, h), None, values, PARTS)[0]
    assert torch.equal(indices, before)
    best = loss(w, indices, scales, h, torch.eye(N), 3)
    for column in (0, 31, 32, 95):
        for index in range(8):
            other = indices.clone()
            other[:, column] = index
            assert (loss(w, other, scales, h, torch.eye(N), 3) >= best * (1 - 1e-5)).all()


@pytest.mark.parametrize("rows", ["alone", "together"])
def test_scales_are_those_of_least_squares(rows: str):
    w, h, indices, scales = start(4)
    g = metric(N, seed=2) if rows == "together" else None
    found = descent.scales(w, indices, scales, h, g, lloyd_max.codebook(4), PARTS)
    c = lloyd_max.codebook(4)[indices.int()].double()
    # The weight is linear in the scales: one column of the design for each.
    design = torch.zeros(N, len(PARTS), N, K, dtype=torch.float64)
    for i in range(N):
        for j, (first, d) in enumerate(PARTS):
            design[i, j, i, first : first + d] = c[i, first : first + d]
    design = design.flatten(2).flatten(0, 1)
    weights = torch.kron((torch.eye(N) if g is None else g).double(), h.double())
    want = torch.linalg.solve(design @ weights @ design.t(), design @ weights @ w.double().flatten())
    torch.testing.assert_close(found.flatten().double(), want, rtol=2e-4, atol=2e-5)


def test_rows_of_zeros_stay_zeros():
    w, h, indices, scales = start(4)
    w[3], scales[3] = 0, 0
    values = lloyd_max.codebook(4)
    indices = descent.indices(*given(w, indices, scales, h), metric(N)[None], values, PARTS)[0]
    assert not descent.scales(w, indices, scales, h, None, values, PARTS)[3].any()
    assert descent.scales(w, indices, scales, h, metric(N), values, PARTS).isfinite().all()
