"""A family of kernels for one kind of product, as dispatch, the tuner and the launch plans see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from qcut.emitters.core.source import EmitError, KernelSource

Problem = TypeVar("Problem")
Tile = TypeVar("Tile")


@dataclass(frozen=True)
class Grid:
    """CTAs of a launch as data, so that C++ computes them, too.

    Attributes:
        rows: of D that one row of CTAs computes.
        one: CTAs along x, y, z for up to ``rows`` rows of D. Each further ``rows`` rows add ``one[0]`` CTAs along x.
        most: largest number of CTAs along x, which then go from tile to tile; None: one CTA for each tile.
    """

    rows: int
    one: tuple[int, int, int]
    most: int | None = None

    def __call__(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        x, y, z = self.one
        ctas = -(-m // self.rows) * x
        return (ctas if self.most is None else min(ctas, self.most), y, z)


@dataclass(frozen=True)
class Family(Generic[Problem, Tile]):
    """One family's functions.

    Attributes:
        name: as in the names of its kernels, in tables and in documents.
        tile_type: class of its tiles.
        validate: raises `EmitError` where the family cannot build (problem, tile, arch).
        emit: (problem, tile, arch) → text.
        grid: (tile, n, sm_count) → CTAs by rows of D; None if a host launcher computes the grid.
        threads: of a CTA; 0 where the host launcher knows.
        smem_bytes: dynamic shared memory of a CTA, of (problem, tile); 0 where the host launcher knows.
        default_tiles: tiles of (problem, arch) to choose from; none where dispatch makes a tile for each shape.
        search_space: every tile of (problem, arch) that a tuner may try, legal or not; none where nothing is tuned.
        version: version of the device code's speed. A change that can make another tile the fastest raises the
            version. Rows that were measured under another version are not used.
    """

    name: str
    tile_type: type[Tile]
    validate: Callable[[Problem, Tile, str], None]
    emit: Callable[[Problem, Tile, str], KernelSource]
    grid: Callable[[Tile, int, int], Grid] | None
    threads: Callable[[Tile], int]
    smem_bytes: Callable[[Problem, Tile], int]
    default_tiles: Callable[[Problem, str], Iterable[Tile]] = lambda problem, arch: ()
    search_space: Callable[[Problem, str], Iterable[Tile]] = lambda problem, arch: ()
    version: int = 1

    def grid_of(self, tile: Tile, n: int, sm_count: int) -> Grid:
        """CTAs by rows of D. A host launcher ignores them."""
        return Grid(1, (1, 1, 1)) if self.grid is None else self.grid(tile, n, sm_count)

    def is_legal(self, problem: Problem, tile: Tile, arch: str) -> bool:
        """Whether the family can build a kernel for the problem with this tile on this architecture."""
        try:
            self.validate(problem, tile, arch)
        except EmitError:
            return False
        return True

    def menu(self, problem: Problem, arch: str) -> list[Tile]:
        """Return the tiles of `default_tiles` that the family can build for a problem."""
        return [tile for tile in self.default_tiles(problem, arch) if self.is_legal(problem, tile, arch)]
