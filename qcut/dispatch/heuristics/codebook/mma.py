"""Tiles of ``codebook_mma``, with the work of the busiest SM, products and decoding counted."""

from __future__ import annotations

from collections.abc import Iterator

from qcut.dispatch.gpus import Target
from qcut.emitters.codebook.mma import CODEBOOK_MMA
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.gemm.problem import TileConfig


def candidates(problem: CodebookProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """The menu, tiles of few stages first: of tiles with the same work, these are taken.

    Raises:
        EmitError: the family's constraints refuse the problem.
    """
    macs = target.machine.mma_macs(problem.x.bits)
    tiles = sorted(CODEBOOK_MMA.default_tiles(problem, target.arch), key=lambda tile: tile.stages)
    if not tiles:
        CODEBOOK_MMA.validate(problem, TileConfig((16, 64, 128), (16, 16, 128), 2), target.arch)
    for tile in tiles:
        (bm, bn, _), (wm, wn, _) = tile.threadblock_shape, tile.warp_shape
        warps = bm // wm * (bn // wn)
        # In products of 16 x 8 of an H200: a warp's decoding of 16 rows takes about as long as three of them; tokens
        # and weights come from the L2 at the rate of the tile's sides.
        products = bn // 16 * (bm // 8) / macs + 3 * bn // 16 * (bm // wm) + (bm + bn) / 8
        slowdown = 1.0 if warps >= 8 else 1.15 if warps >= 4 else 2.0
        waves = -(-(-(-m // bm) * -(-n // bn)) // target.sm_count)
        yield tile, waves * products * slowdown
