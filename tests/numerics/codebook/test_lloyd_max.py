"""Lloyd-Max codebooks: their error on the normal distribution, and that no neighbour has less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics.codebook import lloyd_max
from tests.support.oracles import normal

X = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
DENSITY = torch.exp(-X * X / 2) * (X[1] - X[0]) / (2 * torch.pi) ** 0.5


def error(values: Tensor) -> float:
    """Mean squared error of values on N(0, 1), summed over a grid."""
    nearest = values[torch.searchsorted(lloyd_max.boundaries(values), X)]
    return float(((X - nearest) ** 2 * DENSITY).sum())


@pytest.mark.parametrize(("bits", "published"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_error_is_the_published_least(bits: int, published: float):
    values = torch.tensor(lloyd_max.levels(bits), dtype=torch.float64)
    assert torch.equal(values, -values.flip(0))
    assert torch.equal(lloyd_max.codebook(bits), values.float())
    least = error(values)
    # Max's table of 1960 is off by up to four units of its fourth digit.
    assert least == pytest.approx(published, rel=5e-4)
    for i in range(len(values)):
        for step in (-1e-2, 1e-2):
            moved = values.clone()
            moved[i] += step
            assert error(moved) > least


def test_other_widths_are_refused():
    for bits in (0, 5):
        with pytest.raises(ConfigError, match=f"a codebook of {bits} bits; allowed: 1, 2, 3, 4"):
            lloyd_max.levels(bits)


@pytest.mark.parametrize("values", [*(lloyd_max.codebook(bits) for bits in lloyd_max.BITS), 3 ** torch.arange(-4.0, 9)])
def test_cells_find_what_a_search_finds(values: Tensor):
    edges = lloyd_max.boundaries(values)
    far = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 0.0, -0.0])
    near = [edges, edges.nextafter(far[0]), edges.nextafter(far[1])]
    numbers = torch.cat([far, values, *near, 3 * normal(1, 100_000)[0], 1e-3 * normal(1, 1000)[0]])
    found = lloyd_max.Cells(values).nearest(numbers)
    assert torch.equal(found, torch.searchsorted(edges, numbers, out_int32=True))
    strided, want = (one[:5000].view(2, 2500)[:, 9:2000] for one in (numbers, found))
    assert torch.equal(lloyd_max.Cells(values).nearest(strided), want)
    for count in (1, 5000):
        assert (lloyd_max.Cells(values).nearest(torch.full((count,), torch.nan)) == len(edges)).all()
