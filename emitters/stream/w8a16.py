"""W8A16 for few tokens, bound by memory: float16 or bfloat16 tokens, int8 or e4m3 weights straight into registers.

``D = act((sum_k a[m, k] * b[n, k]) * s_w[n] + bias[n]) (+ residual)``, up to `MAX_TOKENS` rows of a, on
``mma.sync.m16n8k16``. The weights are those of `qcut.emitters.gemm.w8a16`, which takes more rows. Device code:
``include/qcut/stream/w8a16.cuh``.
"""

from __future__ import annotations

from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, shared_memory
from qcut.emitters.core.experts import tile_rows
from qcut.emitters.core.source import KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import HOST_M, GemmProblem
from qcut.emitters.gemm.w8a16 import PROBLEM_CONSTRAINTS
from qcut.emitters.stream.family import StreamFamily
from qcut.emitters.stream.int8 import CUT_CONSTRAINTS, ROUTE_REGISTERS, Int8StreamTile, register_limit

MAX_TOKENS = 32
"""Largest number of rows of a that registers hold with the weights in flight."""
TOKENS = (8, 16, 32)
"""Tokens that a tile may hold; a tile of routes may hold one."""
_OTHER_REGISTERS = 24
"""Registers of a thread for addresses, counters and bounds."""


class W8A16Tile(Int8StreamTile):
    """An `Int8StreamTile` with 8, 16 or 32 ``tokens``, or 1 with experts."""


def smem_bytes(problem: GemmProblem, tile: W8A16Tile) -> int:
    """Dynamic shared memory of a CTA: the sums of every warp, and scale and bias of each row."""
    rows = 16 * tile.row_tiles
    return 4 * (tile.warps * tile.tokens * (rows + 4) + 2 * rows)


def registers(problem: GemmProblem, tile: W8A16Tile) -> int:
    """Estimate a thread's registers: weights in flight, tokens, sums, and the rest."""
    tokens = max(8, tile.tokens)
    other = _OTHER_REGISTERS + ROUTE_REGISTERS * problem.experts
    if problem.epilogue.col_scale == "per_unit":
        other += tile.units * tile.prefetch + tokens // 2
    return 16 * tile.units * (tile.prefetch + tokens // 8) + tokens // 2 + other


CONSTRAINTS = (
    *PROBLEM_CONSTRAINTS,
    HOST_M,
    ARCHITECTURE,
    Constraint("alignments", "are at least 1", lambda p, t, arch: min(p.alignment_k, p.alignment_n) >= 1),
    Constraint(
        "tokens",
        "are 8, 16 or 32, tiles of eight in registers, or 1 with experts",
        lambda p, t, arch: t.tokens in TOKENS or (p.experts and t.tokens == 1),
    ),
    *CUT_CONSTRAINTS,
    Constraint(
        "registers",
        f"weights in flight, tokens, sums and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t) <= register_limit(t.warps),
    ),
    SPLITS,
    CLUSTERS,
    shared_memory("the sums of a CTA's warps fit what the architecture gives it", smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class W8A16Stream(StreamFamily[GemmProblem, W8A16Tile]):
    """Few 16-bit tokens and weights of a byte.

    Arguments are ``problem.params()`` in order; 1 <= m <= ``tile.tokens``, n, k >= 1. b: int8 or e4m3 ``[n, ldb]``,
    16-byte aligned, ldb a multiple of 16 and at least k. a: if ``problem.alignment_k`` is a multiple of 8, so is k, and
    rows start at multiples of 16 bytes; otherwise rows are read element by element, for any lda >= k. D is stored
    element by element. b and the vectors of n are read before the kernel waits for its predecessor. With experts,
    everything is read after it, and m counts the routes of all tiles, ``tile.tokens`` each; a route's row of D is
    written, and no other.

    Exactness: weights to 16 bits is exact and every product is exact in float32; products are added in an order that K
    and the tile fix, with error at most ``K * 2**-23 * sum_k |a * b|`` before the scale. A row's result does not depend
    on the other rows; the same inputs give the same bits.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``ld.global.nc``, ``griddepcontrol``, ``barrier.cluster``.
    """

    name = "w8a16_stream"
    tile_type = W8A16Tile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def _source(self, name: str, problem: GemmProblem, tile: W8A16Tile, arch: str) -> KernelSource:
        aligned = flag(problem.alignment_k % 8 == 0)
        params = problem.params()
        rows = f", {tile_rows(tile.tokens)}" if problem.experts else ""
        arguments = f"a, b, d, m, n, k, lda, ldb, ldd, args{rows}"
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::W8A16Tile<{tile.sizes}>;",
            *problem.epilogue.statements(params),
            f"qcut::w8a16_stream<Tile, {problem.a.cpp}, {aligned}, Epilogue>({arguments});",
            device_code=include("stream/w8a16.cuh"),
            block=32 * tile.warps,
            waits=True,
            smem_bytes=smem_bytes(problem, tile),
            cluster=tile.splits,
        )


W8A16_STREAM = W8A16Stream()
