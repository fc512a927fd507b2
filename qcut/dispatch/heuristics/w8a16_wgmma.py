"""Tiles of ``w8a16_wgmma``.

Source: measured on an H200 at six shapes and 64 to 1,024 tokens (docs/kernel-notes/few-tokens.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from qcut.dispatch.gpus import Target
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.gemm.w8a16_wgmma import UNIT_COLUMNS, W8A16_WGMMA, W8A16WgmmaTile, ctas

# Cycles of an H200's SM.
_START = 4400.0
"""Start of a CTA, its first weights and tokens, and its end."""
_TOKEN = 25.0
"""Storing, adding and writing the sums of a token."""
_SPLIT = 400.0
"""Adding the sums of a CTA of the cluster."""
_UNIT = 1200.0
"""The chain of loading, exchanging and converting a unit, which nothing hides if products are few."""
_CONVERT = 580.0
"""A warpgroup's conversion of a unit, if several share the SM."""


def candidates(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[W8A16WgmmaTile, float]]:
    """K is split only within one wave, and only if each CTA of a cluster has about two units at least."""
    most = max(1, -(-k // UNIT_COLUMNS) // 2)
    tiles = W8A16_WGMMA.default_tiles(problem, target.arch)
    if not tiles or not W8A16_WGMMA.is_legal(problem, tiles[0], target.arch):  # one is legal if all are
        return
    for tile in tiles:
        if tile.splits == 1 or (tile.splits <= most and _waves(tile, m, n, target) == 1):
            yield tile, _cycles(tile, m, n, k, target)


def _cycles(tile: W8A16WgmmaTile, m: int, n: int, k: int, target: Target) -> float:
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
