"""Tiles of ``fp8_cutlass`` and ``fp8_mma``.

Source: the cost model of int8 products, whose rates e4m3 has on an H200's data sheet; nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcut.dispatch.cost_model import estimate, tile_cycles
from qcut.dispatch.gpus import Target
from qcut.emitters.families import FP8_CUTLASS, FP8_MMA
from qcut.emitters.gemm.cutlass.w8a16 import swapped
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

_START = 3600.0
"""Cycles of a start that `tile_cycles` does not count, as those of ``w8a16_cutlass``."""


def cutlass(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """Tiles in the kernel's terms, whose rows are channels; weights are read from memory once."""
    for tile in FP8_CUTLASS.menu(problem, target.arch) if k % 16 == 0 else ():
        cycles = tile_cycles(swapped(tile), problem.epilogue.out.bits, n, m, k, target)
        yield tile, _START + max(cycles, n * k / target.machine.dram_bytes)


def mma(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """Tiles as those of ``int8_mma``."""
    for tile in FP8_MMA.menu(problem, target.arch):
        yield tile, estimate(FP8_MMA.name, problem, tile, m, n, k, target).cycles
