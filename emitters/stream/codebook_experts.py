"""Products of routes to experts with codebook weights, in tiles of up to 32 routes of one expert: decode.

Device code: ``include/qcut/stream/codebook_experts.cuh``. The CTAs of a launch share the rows of all tiles, whatever
their number, which is known on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.codebook.problem import ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, shared_memory
from qcut.emitters.core.experts import EXPERT_ROWS
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag
from qcut.emitters.stream.codebook import decode_source, registers, table_bytes
from qcut.emitters.stream.family import ROW_TILE, StreamFamily
from qcut.emitters.stream.int8 import register_limit

_MORE_REGISTERS, _MORE_REGISTERS_INT8, _MORE_TOKENS = 36, 48, 24
"""Of a thread, beyond those of ``codebook_stream``: where the next rows, tokens and routes lie; and of more tokens, for
each eight.
"""
MAX_ROW_TILES = 32


@dataclass(frozen=True)
class CodebookExpertsTile:
    """How a cluster computes rows.

    Attributes:
        tokens: routes of a tile: 1, 8, 16 or 32.
        row_tiles: tiles of 16 rows whose sums a CTA holds, a multiple of ``prefetch``.
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


def smem_bytes(problem: CodebookProblem, tile: CodebookExpertsTile) -> int:
    """Dynamic shared memory of a CTA. The kernel's text asserts that the device code's own count is the same."""
    blocks, rows = problem.x.bits // 8, ROW_TILE * tile.row_tiles
    staged = tile.units * blocks * -(-tile.tokens // 8) * 128 * min(tile.tokens, 8)
    sums = 4 * tile.tokens * (rows + 4)
    inbox = 4 * ROW_TILE * tile.splits * -(-tile.row_tiles * tile.tokens // tile.splits) if tile.splits > 1 else 0
    return table_bytes(problem) + tile.warps * (staged + sums) + inbox + 8 * rows + 8 * tile.tokens


def fits(problem: CodebookProblem, tile: CodebookExpertsTile, arch: str) -> bool:
    """Whether a multiprocessor holds the CTAs, each of which takes 1 KB of shared memory more than the tile's."""
    memory, threads = architecture(arch).sm_smem_bytes, 32 * tile.warps * tile.ctas
    if tile.ctas > 1 and tile.ctas * (smem_bytes(problem, tile) + 1024) > memory:
        return False
    return threads * min(255, _registers(problem, tile)) <= architecture(arch).registers and threads <= 2048


def _registers(problem: CodebookProblem, tile: CodebookExpertsTile) -> int:
    more = _MORE_REGISTERS_INT8 if problem.x is DType.S8 else _MORE_REGISTERS
    return registers(problem, tile) + more + _MORE_TOKENS * (-(-tile.tokens // 8) - 1)


CONSTRAINTS = (
    ARCHITECTURE,
    ROTATED_BEFORE,
    Constraint("experts", "have a row for each route", lambda p, t, arch: p.experts and not p.summed),
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
        "tokens, weights in flight and sums fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: _registers(p, t) <= register_limit(t.warps),
    ),
    shared_memory("the table, tokens and sums of all warps fit what the architecture gives a CTA", smem_bytes),
    Constraint("ctas", "fit a multiprocessor together, one of them if K is split", lambda p, t, arch: (
        1 <= t.ctas <= 4 and (t.ctas == 1 or t.splits == 1) and fits(p, t, arch)
    )),
)  # fmt: skip
"""Constraints of the family; each takes (problem, tile, arch)."""


class CodebookExperts(StreamFamily[CodebookProblem, CodebookExpertsTile]):
    """Routes to experts in tiles, and codebook weights.

    Arguments are ``problem.params()`` in order: n >= 1, units_k up to ``units * warps * splits``; m counts the places
    of all tiles, ``tokens`` each. A route's row of D is written, and no other, element by element, with any
    ``alignment_n``. With ``early_routes`` all but ``x`` and ``row_scale`` is read before the last kernel's end.

    Exactness: that of `qcut.emitters.stream.codebook.CodebookStream`; neither the order of routes nor the number of
    tiles changes a result.

    Source: PTX ISA, ``mma.sync``, ``cp.async``, ``ldmatrix``, ``barrier.cluster``.
    """

    name = "codebook_experts"
    tile_type = CodebookExpertsTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def grid(self, tile: CodebookExpertsTile, n: int, sm_count: int = 1) -> Grid:
        """As many CTAs as the GPU runs at a time, or one for each group of rows of each tile, if those are fewer."""
        groups = -(-n // (ROW_TILE * tile.prefetch))
        most = max(1, tile.ctas * sm_count // tile.splits) * tile.splits
        return Grid(tile.tokens, (groups * tile.splits, 1, 1), most=most)

    def _source(self, name: str, problem: CodebookProblem, tile: CodebookExpertsTile, arch: str) -> KernelSource:
        sizes = (tile.tokens, tile.row_tiles, tile.warps, tile.units, tile.splits, tile.prefetch)
        table = flag(problem.pairs or problem.x is not DType.S8)
        return decode_source(
            name,
            problem,
            arch,
            header="codebook_experts",
            function="codebook_experts",
            tile=f"qcut::StreamTile<{', '.join(map(str, sizes))}>",
            shared="qcut::ExpertShared",
            shared_last=f", {table}",
            last=f", {flag(problem.early_routes)}",
            rows=f", {EXPERT_ROWS}",
            block=32 * tile.warps,
            smem_bytes=smem_bytes(problem, tile),
            cluster=tile.splits,
            ctas_per_sm=tile.ctas,
        )


CODEBOOK_EXPERTS = CodebookExperts()
