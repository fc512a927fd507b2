"""The tile of the kernels of few tokens with int8 weights, `qcut.emitters.stream.w8a8` and ``w8a16``.

Device code: ``include/qcut/stream/int8.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import Constraint

UNIT_COLUMNS = 128
"""Columns of 16 rows of weights that a warp reads at a time: a unit."""

ROUTE_REGISTERS = 8
"""Registers of a thread for its tile of routes, with experts."""


@dataclass(frozen=True)
class Int8StreamTile:
    """How one kernel divides the product.

    A CTA computes ``16 * row_tiles`` columns of D. K is divided among ``splits * warps`` warps, ``128 * units`` columns
    each. If K is longer, the warps go on in further rounds.

    Attributes:
        row_tiles: tiles of 16 weight rows that a CTA takes, one after the other.
        warps: warps of a CTA.
        units: units of 128 columns that a warp takes at a time.
        prefetch: row tiles that a warp has in flight.
        tokens: rows of a that the kernel holds; a launch may have fewer.
        splits: CTAs of a cluster, which divide K further (sm_90 and later).
    """

    row_tiles: int
    warps: int
    units: int = 1
    prefetch: int = 1
    tokens: int = 8
    splits: int = 1

    @property
    def name(self) -> str:
        """``m{tokens}_r{row_tiles}_w{warps}_u{units}_p{prefetch}``, then the splits if K is split."""
        splits = f"_k{self.splits}" if self.splits > 1 else ""
        return f"m{self.tokens}_r{self.row_tiles}_w{self.warps}_u{self.units}_p{self.prefetch}{splits}"

    @property
    def sizes(self) -> str:
        """The device tile's template arguments."""
        return f"{self.row_tiles}, {self.warps}, {self.units}, {self.prefetch}, {self.tokens}, {self.splits}"


def register_limit(warps: int) -> int:
    """Registers of a thread, in steps of eight, if a CTA of this many warps has the SM's four quarters to itself."""
    return min(255, 16_384 // (32 * -(-warps // 4)) // 8 * 8)


CUT_CONSTRAINTS = (
    Constraint("row_tiles", "are at least 1", lambda p, t, arch: t.row_tiles >= 1),
    Constraint("warps", "are 1 to 32, what a CTA may have", lambda p, t, arch: 1 <= t.warps <= 32),
    Constraint("units", "are at least 1", lambda p, t, arch: t.units >= 1),
    Constraint(
        "prefetch",
        "is 1 to row_tiles: the first tiles of a round fill it",
        lambda p, t, arch: 1 <= t.prefetch <= t.row_tiles,
    ),
)
"""Constraints of a tile's sizes; each takes (problem, tile, arch)."""
