"""Operands of integer layers and of int8 GEMMs."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from qcut.numerics import int16, integers
from qcut.schemes import padded_k
from tests.support.oracles import s8

LAYOUTS = ["".join(flags) for flags in itertools.product("tn", repeat=3)]
"""Of A, B and D, t row-major and n column-major, as `GemmProblem.layouts`."""
SHAPES = ((1, 1, 1), (1, 7, 3), (1, 9, 32), (5, 1, 16), (1, 1, 20), (17, 33, 1), (13, 11, 37), (16, 32, 48))
OUT_LAYOUT = {"t": "row", "n": "column"}


def stored(rows: int, columns: int, row_major: bool, *, ld: int = 0, offset: int = 0) -> Tensor:
    """A full-range int8 matrix ``[rows, columns]`` in a memory order, amid other data."""
    runs, run = (rows, columns) if row_major else (columns, rows)
    ld = max(ld, run)
    memory = s8(offset + runs * ld)
    matrix = memory[offset:].view(runs, ld)[:, :run]
    return matrix if row_major else matrix.t()


def operands(layouts: str, m: int, n: int, k: int, **memory: int) -> tuple[Tensor, Tensor]:
    return stored(m, k, layouts[0] == "t", **memory), stored(n, k, layouts[1] == "n", **memory)


def case(dtype: torch.dtype, m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Tokens, padded weight, bias, multiplier and shift; some results exceed the output's range."""
    g = torch.Generator().manual_seed(seed)
    lo, hi = (-128, 127) if dtype is torch.int8 else (-(2**15), int16.LARGEST)
    q = torch.randint(lo, hi + 1, (m, k), generator=g).to(dtype)
    weight = torch.zeros(n, padded_k(k), dtype=torch.int8)
    weight[:, :k] = torch.randint(-128, 128, (n, k), generator=g)
    spread = hi * 74 * math.sqrt(k)
    bias = (torch.randn(n, generator=g) * spread).long()
    multiplier, shift = integers.fixed_point((torch.rand(n, generator=g).double() + 0.5) * hi / spread)
    return q, weight, bias, multiplier, shift
