"""Products of some hundred rotated tokens with codebook weights on ``wgmma``: decode with batches, sm_90a.

Device code: ``include/qcut/stream/codebook_wgmma.cuh``. Decoded weights, multiplied by their norms, are the operand in
registers; bulk copies bring the tokens to shared memory. The CTAs of a cluster divide K. One kernel serves all K.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

from qcut.emitters.codebook.problem import ONE_WEIGHT, ROTATED_BEFORE, CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import SPLITS, Constraint, holds
from qcut.emitters.core.family import Family, Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.stream.codebook import decode_source, shared_last, table_bytes
from qcut.emitters.stream.family import ROW_TILE

_SMEM_BYTES = architecture("sm_90a").smem_bytes
GROUP_ROWS = 4 * ROW_TILE
"""Rows of a warpgroup."""
TOKENS = (8, 16, 32, 64, 96, 128, 160, 192)
"""Allowed tokens of a CTA."""


@dataclass(frozen=True)
class CodebookStreamWgmmaTile:
    """How a CTA and its cluster share a product.

    Attributes:
        tokens: tokens of a CTA, one of `TOKENS`.
        groups: warpgroups of a CTA, 64 rows each.
        splits: CTAs of a cluster, which share K: 1, 2, 4 or 8.
        stages: stages of the tokens' pipeline, a unit each.
        prefetch: units of weights that a warp has in flight.
        alone: see `qcut.emitters.stream.codebook.CodebookStreamTile`.
    """

    tokens: int
    groups: int
    splits: int
    stages: int
    prefetch: int
    alone: bool = False

    @property
    def name(self) -> str:
        """``t{tokens}_g{groups}_k{splits}_s{stages}_p{prefetch}``, and ``_a`` if alone."""
        return f"t{self.tokens}_g{self.groups}_k{self.splits}_s{self.stages}_p{self.prefetch}" + "_a" * self.alone


def _register_limit(tile: CodebookStreamWgmmaTile) -> int:
    return min(255, 65_536 // (128 * tile.groups) // 8 * 8)


def registers(problem: CodebookProblem, tile: CodebookStreamWgmmaTile) -> int:
    """Estimate a thread's registers: accumulators, two halves of a decoded unit, weights in flight, and the rest."""
    int8 = problem.x is DType.S8
    weights = tile.prefetch * (2 * problem.bits + problem.slots * (1 + problem.offsets))
    books = 8 * (int8 and problem.slots == 8)  # of a product's second slot
    return tile.tokens // 2 + (16 if int8 else 32) + weights + (32 if int8 else 21) + books


CONSTRAINTS = (
    Constraint("architecture", "is sm_90a: no other has wgmma", lambda p, t, arch: arch == "sm_90a"),
    Constraint("alignment", "is at least 1", lambda p, t, arch: p.alignment_n >= 1),
    ROTATED_BEFORE,
    ONE_WEIGHT,
    Constraint("tokens", f"are one of {TOKENS}", lambda p, t, arch: t.tokens in TOKENS),
    Constraint("groups", "are 1 to 8: the warpgroups of a CTA", lambda p, t, arch: 1 <= t.groups <= 8),
    SPLITS,
    Constraint(
        "stages", "are 3 to 32: one is filled while two may still be read", lambda p, t, arch: 3 <= t.stages <= 32
    ),
    Constraint("prefetch", "is 1 to 8 units", lambda p, t, arch: 1 <= t.prefetch <= 8),
    Constraint(
        "registers",
        "accumulators, decoded weights and those in flight fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t) <= _register_limit(t),
    ),
    Constraint(
        "shared_memory",
        f"the table and the stages, or the sums in their place, fit {_SMEM_BYTES} bytes",
        lambda p, t, arch: smem_bytes(p, t) <= _SMEM_BYTES,
    ),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


def smem_bytes(problem: CodebookProblem, tile: CodebookStreamWgmmaTile) -> int:
    """Dynamic shared memory of a CTA. The kernel's text asserts that the device code's own count is the same."""
    rows = GROUP_ROWS * tile.groups
    staged = table_bytes(problem) + tile.stages * 16 * problem.x.bits * tile.tokens
    sums = 4 * tile.tokens * (rows + 4)
    return max(staged, sums) + 16 * tile.stages + 8 * rows + 4 * tile.tokens


_SHAPES = {
    DType.S8: (
        (64, 2, 1),
        (64, 2, 4),
        (96, 1, 2),
        (96, 1, 4),
        (96, 2, 1),
        (96, 2, 2),
        (96, 2, 4),
        (96, 2, 8),
        (96, 3, 4),
        (128, 1, 2),
        (128, 1, 4),
        (128, 2, 1),
        (128, 2, 2),
        (128, 2, 4),
        (160, 1, 2),
        (160, 2, 2),
        (192, 1, 1),
        (192, 1, 2),
        (192, 2, 2),
        (192, 2, 4),
    ),
    DType.F16: (
        (64, 1, 2),
        (64, 2, 1),
        (64, 2, 2),
        (64, 2, 4),
        (64, 3, 2),
        (96, 1, 2),
        (96, 1, 4),
        (96, 2, 1),
        (96, 2, 2),
        (96, 2, 4),
        (96, 2, 8),
        (96, 3, 4),
        (128, 1, 2),
        (128, 1, 4),
        (128, 2, 1),
        (128, 2, 2),
        (128, 2, 4),
        (192, 2, 2),
        (192, 2, 4),
    ),
}
"""Tokens, groups and splits of tiles for prefill: the fastest of some shape on an H200."""


def _deepest(problem: CodebookProblem, tokens: int, groups: int, splits: int) -> tuple[CodebookStreamWgmmaTile, ...]:
    for prefetch, stages in product((4, 3, 2, 1), range(8, 2, -1)):
        tile = CodebookStreamWgmmaTile(tokens, groups, splits, stages, prefetch, alone=True)
        if holds(CONSTRAINTS, problem, tile, "sm_90a"):
            return (tile,)
    return ()


class CodebookStreamWgmma(Family[CodebookProblem, CodebookStreamWgmmaTile]):
    """Some hundred tokens and codebook weights on ``wgmma``.

    Arguments are ``problem.params()`` in order: m, n, units_k >= 1. ``x`` starts at a multiple of 16 bytes. D is stored
    in pieces of up to four elements that ``problem.alignment_n`` allows. ``x``, ``row_scale`` and the residual are read
    after the previous kernel's end; all other arguments may be read before.

    Exactness: int8 tokens: bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` on
    ``qcut.numerics.codebook.layout.int8_weight`` for activations none and relu. 16-bit tokens: each weight ``value *
    norm`` is rounded once, to within ``2**-11`` of itself (bfloat16: the norm too, ``2**-7`` together), or ``2**-25``
    where float16 products are subnormal; sums are float32 in an order that the tile and units_k fix, with error at most
    ``128 * units_k * 2**-23 * sum_k |x * w|`` before the channel's scale. A token's result does not depend on the
    others; the same inputs give the same bits.

    Source: PTX ISA, ``wgmma.mma_async``, ``cp.async.bulk``, ``mbarrier``, ``barrier.cluster``, ``mapa``.
    """

    name = "codebook_stream_wgmma"
    tile_type = CodebookStreamWgmmaTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def threads(self, tile: CodebookStreamWgmmaTile) -> int:
        """One warpgroup for each group of rows."""
        return 128 * tile.groups

    def grid(self, tile: CodebookStreamWgmmaTile, n: int, sm_count: int = 1) -> Grid:
        """A cluster for every ``64 * groups`` rows of the weight and every ``tokens`` tokens."""
        return Grid(tile.tokens, (-(-n // (GROUP_ROWS * tile.groups)) * tile.splits, 1, 1))

    def default_tiles(self, problem: CodebookProblem, arch: str) -> tuple[CodebookStreamWgmmaTile, ...]:
        """Return tiles for prefill, each with as many units of weights and of tokens in flight as fit."""
        shapes = _SHAPES[DType.S8 if problem.x is DType.S8 else DType.F16]
        return tuple(tile for shape in shapes for tile in _deepest(problem, *shape))

    def _source(self, name: str, problem: CodebookProblem, tile: CodebookStreamWgmmaTile, arch: str) -> KernelSource:
        sizes = (tile.tokens, tile.groups, tile.splits, tile.stages, tile.prefetch)
        return decode_source(
            name,
            problem,
            arch,
            header="stream/codebook_wgmma",
            function="codebook_stream_wgmma",
            tile=f"qcut::StreamWgmmaTile<{', '.join(map(str, sizes))}>",
            shared="qcut::StreamWgmmaShared",
            shared_last=shared_last(problem),
            last=f", {gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)}",
            block=128 * tile.groups,
            smem_bytes=smem_bytes(problem, tile),
            cluster=tile.splits,
            alone=tile.alone,
        )


CODEBOOK_STREAM_WGMMA = CodebookStreamWgmma()
