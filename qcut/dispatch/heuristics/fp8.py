"""Tiles of ``fp8_cutlass`` and ``fp8_mma``.

Source: ``fp8_cutlass`` measured on an H200 at five shapes and 32 to 4,096 tokens; ``fp8_mma`` as int8 products, since
data sheets give e4m3 the same rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qcut.dispatch.cost_model import estimate
from qcut.dispatch.gpus import Target
from qcut.emitters.families import FP8_CUTLASS, FP8_MMA
from qcut.emitters.gemm.problem import GemmProblem, TileConfig


class _Cost(NamedTuple):
    """Cycles of a tile of ``fp8_cutlass``."""

    step: float  # of a step of 128 columns
    tile: float  # without its steps


_START = 3500.0
_CUTLASS = {
    (32, 64): _Cost(253, 312),
    (64, 64): _Cost(300, 477),
    (64, 128): _Cost(386, 1458),
    (128, 128): _Cost(590, 3255),
    (192, 128): _Cost(895, 3703),
}
"""By tokens and channels of a tile."""


def cutlass(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """Tiles come in waves; weights are read from memory once."""
    for tile in FP8_CUTLASS.menu(problem, target.arch) if k % 16 == 0 else ():
        tokens, channels, step_columns = tile.threadblock_shape
        cost, steps = _CUTLASS[tokens, channels], -(-k // step_columns)
        waves = -(-(-(-m // tokens) * -(-n // channels)) // target.sm_count)
        yield tile, _START + max(waves * (cost.tile + steps * cost.step), n * k / target.machine.dram_bytes)


def mma(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """Tiles as those of ``int8_mma``."""
    for tile in FP8_MMA.menu(problem, target.arch):
        yield tile, estimate(FP8_MMA.name, problem, tile, m, n, k, target).cycles
