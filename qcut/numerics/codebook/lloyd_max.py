"""Lloyd-Max codebooks for the normal distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from qcut.errors import ConfigError

BITS = (1, 2, 3, 4)
_TOLERANCE = 1e-15
_FEW = 1024  # numbers that are searched for in less time than the operations on the table take to start
_MAX_STEPS = 10_000  # 16 levels take 1,080


@cache
def levels(bits: int) -> tuple[float, ...]:
    """The ``2**bits`` values that represent N(0, 1) with the least mean squared error, ascending.

    Each value is the mean of the normal distribution over the interval between the midpoints to its neighbours.

    Args:
        bits: 1 to 4.

    Raises:
        ConfigError: another number of bits.

    Exactness: a fixed point of that condition in float64, symmetric bit by bit.

    Source: Lloyd, "Least squares quantization in PCM" (1957/1982), method I; Max, "Quantizing for minimum distortion"
    (1960). Max's table of errors is exact to three digits: at 4 bits it has 0.009497, the least is 0.009501.
    """
    if bits not in BITS:
        raise ConfigError(f"a codebook of {bits} bits; allowed: {', '.join(map(str, BITS))}")
    count = 1 << (bits - 1)  # the positive half
    values = [3 * (i + 0.5) / count for i in range(count)]
    for _ in range(_MAX_STEPS):
        means = centroids((0.0, *midpoints(values), math.inf))
        moved = max(abs(a - b) for a, b in zip(values, means, strict=True))
        values = means
        if moved < _TOLERANCE:
            break
    return (*(-v for v in reversed(values)), *values)


def centroids(edges: Iterable[float]) -> list[float]:
    """The mean of N(0, 1) over each interval between ascending edges: half a step of Lloyd's method I."""
    return [(_density(low) - _density(high)) / (_below(high) - _below(low)) for low, high in pairwise(edges)]


def midpoints(values: Sequence[float]) -> list[float]:
    """The numbers halfway between neighbours."""
    return [(a + b) / 2 for a, b in pairwise(values)]


def codebook(bits: int, device: torch.device | str | None = None) -> Tensor:
    """float32 ``[2**bits]``: `levels`, each rounded once."""
    return torch.tensor(levels(bits), dtype=torch.float32, device=device)


def boundaries(values: Tensor) -> Tensor:
    """Midpoints ``[n - 1]`` between ascending values ``[n]``, in their dtype, as `torch.searchsorted` takes them."""
    return (values[1:] + values[:-1]) / 2


class Cells:
    """A codebook's intervals as a table: cells of equal width, narrow enough for one boundary each.

    Args:
        values: ascending, float32 ``[n]``.
    """

    def __init__(self, values: Tensor) -> None:
        self._search = edges = boundaries(values)
        least = float(edges.diff().min()) if len(edges) > 1 else 1.0
        self._per_unit = 2 / least
        self._start = float(edges[0]) - least
        self._last = int((float(edges[-1]) - self._start) * self._per_unit) + 2
        places = self._cells(edges).long()
        here = torch.zeros(self._last + 1, dtype=torch.int32, device=values.device).index_fill_(0, places, 1)
        self._edges = torch.full(here.shape, torch.inf, dtype=values.dtype, device=values.device)
        self._edges[places] = edges
        self._below = here.cumsum(0, dtype=torch.int32) - here

    def nearest(self, numbers: Tensor) -> Tensor:
        """int32 indices, of the numbers' shape, of the values nearest to numbers; of two as near, the lower one.

        Exactness: bitwise ``torch.searchsorted`` in the `boundaries`. NaN has
        the last index.
        """
        if numbers.numel() < _FEW or numbers.device.type != "cpu":
            return torch.searchsorted(self._search, numbers, out_int32=True)
        cells = self._cells(numbers).flatten()
        edges, below = (table.index_select(0, cells).view(numbers.shape) for table in (self._edges, self._below))
        return below + (numbers > edges)

    def _cells(self, numbers: Tensor) -> Tensor:
        # Rounding keeps the order, so that only numbers in a boundary's own cell need to be compared with it.
        places = (numbers - self._start) * self._per_unit
        return places.nan_to_num_(self._last).clamp_(0, self._last).to(torch.int32)


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
