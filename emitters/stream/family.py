"""What families of few tokens have in common, whose CTAs take tiles of 16 rows of weights."""

from __future__ import annotations

from typing import Protocol, TypeVar

from qcut.emitters.core.family import Family, Grid, Problem

ROW_TILE = 16
"""Rows of weights of a tensor-core product."""


class StreamTile(Protocol):
    """A tile of such a family."""

    @property
    def name(self) -> str:
        """Its part of a kernel's name."""

    @property
    def tokens(self) -> int:
        """The most tokens of a launch."""

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of a CTA."""

    @property
    def warps(self) -> int:
        """Warps of a CTA."""

    @property
    def splits(self) -> int:
        """CTAs of a cluster, which share K."""


Tile = TypeVar("Tile", bound=StreamTile)


class StreamFamily(Family[Problem, Tile]):
    """A family of few tokens."""

    def threads(self, tile: Tile) -> int:
        """32 for each warp."""
        return 32 * tile.warps

    def grid(self, tile: Tile, n: int, sm_count: int = 1) -> Grid:
        """A cluster for every ``16 * row_tiles`` rows of the weight."""
        return Grid(tile.tokens, (-(-n // (ROW_TILE * tile.row_tiles)) * tile.splits, 1, 1))
