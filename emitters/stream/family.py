"""Shared by the decode families: a CTA takes tiles of 16 rows of weights."""

from __future__ import annotations

from typing import Any

from qcut.emitters.core.family import Family, Grid, Problem, Tile

ROW_TILE = 16
"""Rows of weights of a tensor-core product."""


class StreamFamily(Family[Problem, Tile]):
    """A family for decode. Its tiles have tokens, row tiles and warps of a CTA, and splits of K over a cluster."""

    def threads(self, tile: Any) -> int:
        """32 for each warp."""
        warps: int = tile.warps
        return 32 * warps

    def grid(self, tile: Any, n: int, sm_count: int = 1) -> Grid:
        """A cluster for every ``16 * row_tiles`` rows of the weight."""
        return Grid(tile.tokens, (-(-n // (ROW_TILE * tile.row_tiles)) * tile.splits, 1, 1))
