"""Tiles of ``w8a16_cutlass``.

Source: measured on an H200 at three shapes and 512 to 4,096 tokens, to 4 % (docs/kernel-notes/mixed-products.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qcut.dispatch.gpus import Target
from qcut.emitters.gemm.cutlass.w8a16 import W8A16_CUTLASS
from qcut.emitters.gemm.problem import GemmProblem, TileConfig


class _CutlassCost(NamedTuple):
    """Cycles of a tile of ``w8a16_cutlass``."""

    step: float  # of a step of 64 columns
    tile: float  # without its steps; a ping-pong tile's end is hidden by the next tile


_CUTLASS_START = 4800.0
_CUTLASS = {(128, 64): _CutlassCost(390, 530), (256, 64): _CutlassCost(567, 250), (256, 128): _CutlassCost(1009, 4000)}
"""By tokens and channels of a tile."""
_ROW, _ROW_PAST_END = 2.0, 15.0
"""A token's 64 columns, copied by TMA, and the zeros that TMA writes past the last token."""


def candidates(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """Tiles come in waves. In the last tile of tokens, zeros may take longer than products."""
    for tile in W8A16_CUTLASS.menu(problem, target.arch) if k % 16 == 0 else ():
        yield tile, _cycles(tile, m, n, k, target)


def _cycles(tile: TileConfig, m: int, n: int, k: int, target: Target) -> float:
    tokens, channels, step_columns = tile.threadblock_shape
    cluster = tile.cluster_shape[1]
    cost, steps = _CUTLASS[tokens, channels], -(-k // step_columns)
    tiles = -(-m // tokens) * -(-n // (channels * cluster))  # of a cluster
    waves = -(-tiles // max(1, target.machine.clusters_at_once(cluster)))
    there = (m - 1) % tokens + 1
    last = max(cost.step, _ROW * there + _ROW_PAST_END * (tokens - there))
    busiest = waves * cost.tile + steps * ((waves - 1) * cost.step + last)
    return _CUTLASS_START + max(busiest, n * k / target.machine.dram_bytes)
