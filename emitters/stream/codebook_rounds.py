"""Products of up to 16 rotated tokens with codebook weights on ``mma.sync``, for any K and little shared memory.

Device code: ``include/qcut/stream/codebook_rounds.cuh``. The warps of a CTA go along K in rounds and decode weights by
a book in registers. `qcut.emitters.stream.codebook` is faster where its table and the tokens of all K fit a CTA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcut.emitters.codebook.problem import DENSE_TABLE_BYTES, ONE_WEIGHT, ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import ARCHITECTURE, Constraint
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.stream.codebook import decode_source
from qcut.emitters.stream.family import ROW_TILE, StreamFamily


@dataclass(frozen=True)
class CodebookRoundsTile:
    """How a CTA shares a product.

    Attributes:
        tokens: the most tokens of a launch: 1, 2, 4, 8 or 16.
        row_tiles: tiles of 16 rows of a CTA; a warp multiplies all of them in each round.
        warps: warps of a CTA, which take a unit of 128 columns each in a round.
        ctas: CTAs that an SM's registers and shared memory hold.
    """

    tokens: int
    row_tiles: int
    warps: int
    ctas: int = 1
    splits: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """``t{tokens}_r{row_tiles}_w{warps}_c{ctas}``."""
        return f"t{self.tokens}_r{self.row_tiles}_w{self.warps}_c{self.ctas}"


def registers(problem: CodebookProblem, tile: CodebookRoundsTile) -> int:
    """Estimate a thread's registers: weights in flight, tokens, sums, operands decoded ahead, and the rest."""
    token_tiles = -(-tile.tokens // 8)
    int8 = problem.x is DType.S8
    slots = problem.slots * (1 + problem.offsets)
    weights = tile.row_tiles * (2 * problem.bits + slots + (2 if int8 else 0))
    tokens = token_tiles * (8 if int8 else 16)
    sums = 4 * token_tiles * tile.row_tiles
    # Without bounds, the compiler decodes several tiles of 16-bit weights before it multiplies the first.
    if problem.offsets and problem.slots < 8:
        # Sums of tokens by slot; of four slots the compiler keeps each tile's as well.
        sums += 2 * problem.slots * token_tiles + (8 * tile.row_tiles + 4) * (problem.slots == 4)
    if problem.slots == 8:
        sums += 28 * tile.row_tiles  # products of single slots, of several tiles ahead
    return weights + tokens + sums + (40 if int8 else 32 + 14 * tile.row_tiles)


def _more_on(problem: CodebookProblem, tile: CodebookRoundsTile, arch: str) -> int:
    """Registers that sm_89's code of four row tiles needs beyond the estimate: with int8 tokens it spills."""
    return 24 if (arch, tile.row_tiles, problem.x) == ("sm_89", 4, DType.S8) else 0


def register_limit(tile: CodebookRoundsTile) -> int:
    """Registers that the register file has for a thread of each CTA, in steps of 8."""
    return min(255, 65_536 // (32 * tile.warps * tile.ctas) // 8 * 8)


def smem_bytes(problem: CodebookProblem, tile: CodebookRoundsTile) -> int:
    """Dynamic shared memory of a CTA. The kernel's text asserts that the device code's own count is the same.

    CTAs that fit an SM's registers also fit every architecture's shared memory, except with tables of pairs.
    """
    blocks, rows = problem.x.bits // 8, ROW_TILE * tile.row_tiles
    staged = blocks * -(-tile.tokens // 8) * 128 * min(tile.tokens, 8)
    sums = 4 * tile.tokens * (rows + 4)
    table = DENSE_TABLE_BYTES * problem.pairs
    return table + tile.warps * max(staged, sums) + 8 * rows + 4 * tile.tokens


CONSTRAINTS = (
    ARCHITECTURE,
    Constraint("alignment", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    ROTATED_BEFORE,
    ONE_WEIGHT,
    Constraint(
        "tokens",
        "are 1, 2, 4, 8 or 16: rows of the second operand, eight to a product",
        lambda p, t, arch: t.tokens in (1, 2, 4, 8, 16),
    ),
    Constraint("row_tiles", "are 1 to 4: their sums are in registers", lambda p, t, arch: 1 <= t.row_tiles <= 4),
    Constraint("warps", "are 1 to 32: those of a CTA", lambda p, t, arch: 1 <= t.warps <= 32),
    Constraint("ctas", "of an SM are 1 to 8", lambda p, t, arch: 1 <= t.ctas <= 8),
    Constraint(
        "registers",
        "weights, tokens and sums fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t) + _more_on(p, t, arch) <= register_limit(t),
    ),
    Constraint(
        "shared_memory",
        "of the CTAs, 1 KB more for each, fits an SM's",
        lambda p, t, arch: t.ctas * (smem_bytes(p, t) + 1024) <= architecture(arch).sm_smem_bytes,
    ),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class CodebookStreamRounds(StreamFamily[CodebookProblem, CodebookRoundsTile]):
    """Up to 16 tokens and codebook weights, in rounds along K.

    Arguments are ``problem.params()`` in order: n, units_k >= 1, 1 <= m <= ``tile.tokens``. D is stored element by
    element, with any ``alignment_n``. ``x``, ``row_scale`` and the residual are read after the previous kernel's end;
    all other arguments may be read before.

    Exactness: that of `qcut.emitters.stream.codebook.CodebookStream`, in another order of float32 sums.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``mma.sync.m16n8k32``, ``prmt``, ``cp.async``, ``ldmatrix``.
    """

    name = "codebook_stream_rounds"
    tile_type = CodebookRoundsTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def _source(self, name: str, problem: CodebookProblem, tile: CodebookRoundsTile, arch: str) -> KernelSource:
        sizes = (tile.tokens, tile.row_tiles, tile.warps, 1, 1, tile.row_tiles)
        return decode_source(
            name,
            problem,
            arch,
            header="stream/codebook_rounds",
            function="codebook_stream_rounds",
            tile=f"qcut::StreamTile<{', '.join(map(str, sizes))}>",
            shared="qcut::StreamShared",
            shared_last=", true, qcut::DensePairTable" if problem.pairs else ", false",
            tokens=f"qcut::BlockTokens<{problem.x.cpp}, Tile>{{x}}",
            block=32 * tile.warps,
            smem_bytes=smem_bytes(problem, tile),
            ctas_per_sm=tile.ctas,
        )


CODEBOOK_STREAM_ROUNDS = CodebookStreamRounds()
