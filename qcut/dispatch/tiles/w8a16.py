"""Models of the time of ``w8a16_wgmma`` and of ``w8a16_cutlass``, by which tiles of both are chosen.

Source: measured on an H200. ``w8a16_wgmma`` at six shapes and 64 to 1,024 tokens, where the choice takes at most 1.12
times as long as the best tile that was measured, 1.005 times in the geometric mean (docs/kernel-notes/few-tokens.md);
``w8a16_cutlass`` at three shapes and 512 to 4,096 tokens, to 4 % (docs/kernel-notes/mixed-products.md).
"""

from __future__ import annotations

from typing import NamedTuple

from qcut.dispatch.gpus import Target
from qcut.emitters.core.source import DType
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.w8a16_wgmma import UNIT_COLUMNS, W8A16_WGMMA, W8A16WgmmaTile, ctas
from qcut.emitters.stream.w8a16 import MAX_TOKENS

# Cycles of an H200's SM.
_START = 4400.0
"""Start of a CTA, its first weights and tokens, and its end."""
_TOKEN = 25.0
"""Storing, adding and writing the sums of a token."""
_SPLIT = 400.0
"""Adding the sums of a CTA of the cluster."""
_UNIT = 1200.0
"""The chain of loading, exchanging and converting a unit, which nothing hides where products are few."""
_CONVERT = 580.0
"""A warpgroup's conversion of a unit, where several share the SM."""


def is_wgmma_better(m: int) -> bool:
    """Whether ``w8a16_wgmma`` is the fastest: wherever ``w8a16_stream`` does not take so many tokens."""
    return m > MAX_TOKENS


def wgmma_tile(m: int, n: int, k: int, target: Target) -> W8A16WgmmaTile:
    """The tile of the menu with the least `wgmma_cycles`.

    K is split only within one wave, and only where each CTA of a cluster has about two units at least.
    """
    most = max(1, -(-k // UNIT_COLUMNS) // 2)
    tiles = [
        t
        for t in W8A16_WGMMA.default_tiles(GemmProblem(DType.F16), target.arch)
        if t.splits == 1 or (t.splits <= most and _waves(t, m, n, target) == 1)
    ]
    return min(tiles, key=lambda tile: wgmma_cycles(tile, m, n, k, target))


def wgmma_cycles(tile: W8A16WgmmaTile, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch, in cycles of an SM."""
    machine, waves = target.machine, _waves(tile, m, n, target)
    resident = min(tile.ctas, -(-ctas(tile, m, n) // machine.sm_count))
    all_units = -(-k // UNIT_COLUMNS)
    units = -(-all_units // tile.splits)
    products = 4.0 * tile.tokens * tile.groups * resident
    chain = units * max(_UNIT, _CONVERT * tile.groups * resident, products)
    ends = _START + _TOKEN * min(tile.tokens, m) + _SPLIT * tile.splits
    return max(waves * chain, n * k / machine.dram_bytes) + waves * ends


def _waves(tile: W8A16WgmmaTile, m: int, n: int, target: Target) -> int:
    at_once = max(1, target.machine.clusters_at_once(tile.splits)) * tile.splits * tile.ctas
    return -(-ctas(tile, m, n) // at_once)


class _CutlassCost(NamedTuple):
    """Cycles of a tile of ``w8a16_cutlass``.

    Attributes:
        step: of a step of 64 columns.
        tile: beside the steps; a ping-pong tile's end is hidden by the next tile.
    """

    step: float
    tile: float


_CUTLASS_START = 4800.0
_CUTLASS = {(128, 64): _CutlassCost(390, 530), (256, 64): _CutlassCost(567, 250), (256, 128): _CutlassCost(1009, 4000)}
"""By tokens and channels of a tile."""
_ROW, _ROW_PAST_END = 2.0, 15.0
"""A token's 64 columns, copied by TMA, and the zeros that TMA writes where there is no token."""


def cutlass_cycles(tile: TileConfig, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch of a tile of ``w8a16_cutlass``'s menu, in cycles of an SM.

    Tiles come in waves. In the last tile of tokens, zeros may take longer than products.
    """
    tokens, channels, step_columns = tile.threadblock_shape
    cluster = tile.cluster_shape[1]
    cost, steps = _CUTLASS[tokens, channels], -(-k // step_columns)
    tiles = -(-m // tokens) * -(-n // (channels * cluster))  # of a cluster
    waves = -(-tiles // max(1, target.machine.clusters_at_once(cluster)))
    there = (m - 1) % tokens + 1
    last = max(cost.step, _ROW * there + _ROW_PAST_END * (tokens - there))
    busiest = waves * cost.tile + steps * ((waves - 1) * cost.step + last)
    return _CUTLASS_START + max(busiest, n * k / target.machine.dram_bytes)
