"""Error feedback: the factor, and values that follow from those before them in rows and columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.numerics.codebook import lloyd_max, rotation
from qcut.numerics.codebook.fitting.feedback import by_antidiagonals, by_columns, unit_factor
from tests.support.oracles import normal


def metric(k: int, seed: int = 1) -> Tensor:
    """A symmetric matrix with directions that differ by two orders of magnitude."""
    basis, _ = torch.linalg.qr(normal(k, k, seed=seed).double())
    return ((basis * torch.logspace(0, -2, k, dtype=torch.float64)) @ basis.t()).float()


def given(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one expert, as functions of several take them."""
    return [tensor[None] for tensor in tensors]


def test_the_factor():
    h = metric(24)
    u = unit_factor(h)
    assert u is not None
    assert torch.equal(u, u.triu())
    assert torch.equal(u.diagonal(), torch.ones(24))
    middle = torch.linalg.solve(u.double(), torch.linalg.solve(u.double(), h.double()).t())
    torch.testing.assert_close(middle, middle.diagonal().diag(), rtol=0, atol=1e-6)
    assert unit_factor(torch.zeros(3, 3)) is None


@pytest.mark.parametrize(("n", "k"), [(7, 16), (16, 7), (1, 9), (9, 1), (12, 12)])
def test_antidiagonals_are_the_recursion_over_rows_and_columns(n: int, k: int):
    w, values = normal(n, k), lloyd_max.codebook(2)
    columns = 0.5 + normal(n, k, seed=3).abs()
    columns[0, 0] = 0.0
    u, v = unit_factor(metric(k)), unit_factor(metric(n, seed=2))
    assert u is not None
    assert v is not None
    edges, error, want = lloyd_max.boundaries(values), torch.zeros(n, k), torch.empty(n, k, dtype=torch.uint8)
    for i in range(n):
        for j in range(k):
            passed = (v.t() @ error @ u)[i, j]  # error[i, j] is still 0
            scale = columns[i, j] if columns[i, j] > 0 else torch.tensor(1.0)
            want[i, j] = torch.searchsorted(edges, (w[i, j] + passed) / scale)
            error[i, j] = w[i, j] - values[int(want[i, j])] * columns[i, j]
    assert torch.equal(by_antidiagonals(w, columns, u, v, values), want)


def test_rows_by_themselves_are_those_of_columns():
    w, values, parts = normal(10, 256), lloyd_max.codebook(3), rotation.groups(256, 128)
    u = unit_factor(metric(256))
    assert u is not None
    indices, scales = (one[0] for one in by_columns(w[None], u[None], values, parts))
    columns = rotation.per_column(scales, parts)
    other = by_antidiagonals(w, columns, u, torch.eye(10), values)
    # The two add up in different orders.
    assert (other == indices).float().mean() > 0.99
