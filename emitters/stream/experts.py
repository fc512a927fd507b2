"""Products of routes to experts in tiles of up to 32 routes of one expert, at the speed of memory: decode.

Device code: ``include/qcut/experts/stream.cuh``. The CTAs of a launch share the rows of all tiles, whatever their
number, which is known on the device only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qcut.emitters.core.arch import architecture, clusters_at_once
from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, shared_memory
from qcut.emitters.core.family import Grid, Problem
from qcut.emitters.stream.family import ROW_TILE, StreamFamily
from qcut.emitters.stream.int8 import register_limit

MAX_ROW_TILES = 32


@dataclass(frozen=True)
class ExpertsTile:
    """How a cluster computes rows.

    Attributes:
        tokens: routes of a tile: 1, 8, 16 or 32.
        row_tiles: tiles of 16 rows with sums in a CTA, a multiple of ``prefetch``.
        warps: warps of a CTA, which share K.
        units: units of 128 columns of every row tile that a warp multiplies.
        splits: CTAs of a cluster, which share K: 1, 2, 4 or 8.
        prefetch: row tiles of units that a warp has in flight.
        ctas: CTAs of a multiprocessor.
    """

    tokens: int
    row_tiles: int
    warps: int
    units: int = 1
    splits: int = 1
    prefetch: int = 1
    ctas: int = 1

    @property
    def name(self) -> str:
        """``t{tokens}_r{row_tiles}_w{warps}_u{units}_k{splits}_p{prefetch}_c{ctas}``."""
        sizes = f"t{self.tokens}_r{self.row_tiles}_w{self.warps}_u{self.units}"
        return f"{sizes}_k{self.splits}_p{self.prefetch}_c{self.ctas}"

    @property
    def sizes(self) -> str:
        """The device tile's template arguments."""
        sizes = (self.tokens, self.row_tiles, self.warps, self.units, self.splits, self.prefetch)
        return ", ".join(map(str, sizes))


def smem_bytes(element_bytes: int, table_bytes: int, tile: ExpertsTile) -> int:
    """Dynamic shared memory of a CTA, of tokens of so many bytes an element, behind a table.

    The kernels' text asserts that the device code's own count is the same.
    """
    rows = ROW_TILE * tile.row_tiles
    staged = tile.units * element_bytes * -(-tile.tokens // 8) * 128 * min(tile.tokens, 8)
    sums = 4 * tile.tokens * (rows + 4)
    inbox = 4 * ROW_TILE * tile.splits * -(-tile.row_tiles * tile.tokens // tile.splits) if tile.splits > 1 else 0
    parts = 2 if tile.splits > 1 else 1  # rows with sent sums, and the next ones
    parts_bytes = parts * (inbox + 8 * rows + 8 * tile.tokens) + (32 if parts > 1 else 0)
    return table_bytes + tile.warps * (staged + sums) + parts_bytes


def tile_constraints(
    registers: Callable[[Any, ExpertsTile], int], smem: Callable[[Any, ExpertsTile], int]
) -> tuple[Constraint, ...]:
    """Constraints of a tile, from the registers of a thread and the shared memory of a CTA."""

    def fits(problem: Any, tile: ExpertsTile, arch: str) -> bool:
        # Each CTA takes 1 KB of shared memory more than the tile's.
        return tile.ctas == 1 or tile.ctas * (smem(problem, tile) + 1024) <= architecture(arch).sm_smem_bytes

    return (
        ARCHITECTURE,
        Constraint("alignment", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
        Constraint("tokens", "are 1, 8, 16 or 32: routes of a tile", lambda p, t, arch: t.tokens in (1, 8, 16, 32)),
        Constraint("warps", "are 1 to 32: those of a CTA", lambda p, t, arch: 1 <= t.warps <= 32),
        Constraint("units", "of a warp are 1 to 8", lambda p, t, arch: 1 <= t.units <= 8),
        Constraint("prefetch", "is 1 to 4 row tiles", lambda p, t, arch: 1 <= t.prefetch <= 4),
        Constraint(
            "row_tiles",
            f"are a multiple of prefetch, up to {MAX_ROW_TILES}",
            lambda p, t, arch: 1 <= t.row_tiles <= MAX_ROW_TILES and t.row_tiles % t.prefetch == 0,
        ),
        SPLITS,
        CLUSTERS,
        Constraint(
            "registers",
            "tokens, weights in flight and sums fit a thread's 255 and, for all CTAs, the SM's 65536",
            lambda p, t, arch: registers(p, t) <= register_limit(t.warps * t.ctas),
        ),
        shared_memory("the table, tokens and sums of all warps fit what the architecture gives a CTA", smem),
        Constraint(
            "ctas",
            "fit a multiprocessor together, one of them if K is split",
            lambda p, t, arch: 1 <= t.ctas <= 4 and (t.ctas == 1 or t.splits == 1) and fits(p, t, arch),
        ),
    )


class ExpertsFamily(StreamFamily[Problem, ExpertsTile]):
    """A family with CTAs that share the rows of all tiles of routes."""

    tile_type = ExpertsTile

    def grid(self, tile: ExpertsTile, n: int, sm_count: int = 1) -> Grid:
        """As many CTAs as the GPU runs at a time, or one for each group of rows of each tile, if those are fewer."""
        groups = -(-n // (ROW_TILE * tile.prefetch))
        most = max(1, tile.ctas * clusters_at_once(tile.splits, sm_count)) * tile.splits
        return Grid(tile.tokens, (groups * tile.splits, 1, 1), most=most)
