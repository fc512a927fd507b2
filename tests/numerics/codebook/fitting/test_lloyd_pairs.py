"""The method that makes the codebook of pairs: its table, its error, and that it has come to its end."""

from __future__ import annotations

import torch

from qcut.numerics.codebook import lloyd_max, pairs
from qcut.numerics.codebook.fitting import lloyd_pairs


def test_the_table_is_where_the_method_ends():
    stored = torch.tensor(pairs.QUADRANT, dtype=torch.float64)
    found, error = lloyd_pairs.settled(stored)
    # Machines may differ where a point is rounded to its last digit.
    assert (torch.tensor(lloyd_pairs.table(found), dtype=torch.float64) - stored).abs().max() < 1.5e-4
    means, _ = lloyd_pairs.centroids(found)
    assert (means - found).abs().max() < 1e-6
    assert abs(lloyd_pairs.centroids(stored)[1] - error) < 1e-7


def test_lloyd_iteration_does_not_improve_the_pairs():
    found, error = lloyd_pairs.solve()
    means, _ = lloyd_pairs.centroids(found)
    assert (means - found).abs().max() < 1e-6
    stored = lloyd_pairs.centroids(torch.tensor(pairs.QUADRANT, dtype=torch.float64))[1]
    assert 0.999 * stored < error < 1.01 * stored


def test_pairs_err_less_than_single_values():
    # On a grid with cells that are small against those of the codebook, independent of the method's own integrals.
    x = (torch.arange(1600, dtype=torch.float64) + 0.5) * (7 / 1600)
    weight = torch.exp(-x * x / 2)
    weight /= weight.sum()
    points = torch.tensor(pairs.QUADRANT, dtype=torch.float64)
    error = 0.0
    for first in range(0, len(x), 100):
        rows = x[first : first + 100]
        nearest = torch.full((len(rows), len(x)), torch.inf, dtype=torch.float64)
        for a, b in points.tolist():
            nearest = torch.minimum(nearest, (rows[:, None] - a).square() + (x - b).square())
        error += float((weight[first : first + 100, None] * weight * nearest).sum()) / 2
    values = torch.tensor(lloyd_max.levels(4), dtype=torch.float64)
    single = (values[torch.searchsorted(lloyd_max.boundaries(values), x)] - x).square() @ weight
    assert abs(error - 0.00779) < 2e-5
    assert error < 0.82 * float(single)


def test_no_point_could_move():
    points = torch.tensor(pairs.QUADRANT, dtype=torch.float64)
    least = lloyd_pairs.centroids(points)[1]
    for i in range(0, len(points), 7):
        for step in ((0.01, 0.0), (-0.01, 0.0), (0.0, 0.01), (0.0, -0.01)):
            moved = points.clone()
            moved[i] += torch.tensor(step, dtype=torch.float64)
            assert lloyd_pairs.centroids(moved)[1] > least
