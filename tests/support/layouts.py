"""Operands of an int8 GEMM in every memory order, amid other data."""

from __future__ import annotations

import itertools

from torch import Tensor

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
