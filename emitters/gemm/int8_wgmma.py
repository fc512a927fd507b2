"""Prefill with int8 weights of experts on sm_90a: many tokens of int8 or 16 bits, products by ``wgmma``.

``D = act((sum_k a[m, k] * b[e, n, k]) * s_a[m] * s_b[e, n] + bias[e, n])``, e the expert of route m; 16-bit tokens have
no ``s_a``. The kernel is that of `qcut.emitters.codebook.wgmma`, with weights that need no codebook. Device code:
``include/qcut/experts/int8_wgmma.cuh``. A stage has tokens and the CTA's rows of weights; products of int8 tokens read
both there, and nothing is decoded. The kernels need only NVRTC.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from qcut.emitters.codebook.wgmma import (
    CODEBOOK_WGMMA,
    ROWS,
    SMEM_BYTES,
    THREADS,
    TILE_CONSTRAINTS,
    CodebookWgmmaTile,
    Stage,
    buffers,
    deepest,
    smem_bytes,
)
from qcut.emitters.core.constraints import Constraint, holds
from qcut.emitters.core.experts import EXPERT_ROWS
from qcut.emitters.core.family import Family, Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import HOST_M, GemmProblem

WIDE_TOKENS = 192
"""Most 16-bit tokens of a tile: more leave room for two stages, and both are read at the same time."""
SCALED_TOKENS = 128
"""Most tokens of a tile with scales of units."""
_SHAPES = ((256, 1), (256, 2), (192, 1), (192, 2), (160, 1), (128, 1), (96, 1))
"""Tokens and cluster of the menu's tiles."""


def stage_of(problem: GemmProblem) -> Stage:
    """The stage of a product with int8 weights."""
    return Stage(problem.a.bits // 8, ROWS * 128, routed=True)


def _scaled_by_channel(problem: GemmProblem, tile: Any, arch: str) -> bool:
    e, is_int8 = problem.epilogue, problem.a is DType.S8
    plain = (e.row_scale, e.zero_point, e.halves, e.rescale) == (
        "per_token" if is_int8 else "none",
        "none",
        False,
        False,
    )
    return plain and e.col_scale in ("per_channel", "per_unit")


PROBLEM_CONSTRAINTS = (
    Constraint("experts", "have routes: other products are of other families", lambda p, t, arch: p.experts),
    HOST_M,
    Constraint("epilogue", "has scales of channels or units, and of int8 tokens", _scaled_by_channel),
    Constraint("out", "is f16, bf16 or f32", lambda p, t, arch: p.epilogue.out in (DType.F16, DType.BF16, DType.F32)),
)
"""Constraints of products with int8 weights of experts; each takes (problem, tile, arch)."""
CONSTRAINTS = (
    *PROBLEM_CONSTRAINTS,
    *TILE_CONSTRAINTS,
    Constraint("one_part", "is all of K: parts of K write neighbouring rows", lambda p, t, arch: t.splits == 1),
    Constraint("pairs", "are of codebooks", lambda p, t, arch: not t.pairs),
    Constraint(
        "units",
        f"have scales with up to {SCALED_TOKENS} tokens: their sums take as many registers as those of all units",
        lambda p, t, arch: p.epilogue.col_scale != "per_unit" or t.tokens <= SCALED_TOKENS,
    ),
    Constraint(
        "three_stages",
        f"fit with int8 tokens of up to 256, of 16 bits up to {WIDE_TOKENS}",
        lambda p, t, arch: p.a is DType.S8 or t.tokens <= WIDE_TOKENS,
    ),
    Constraint(
        "shared_memory",
        "stages and staging fit a CTA's",
        lambda p, t, arch: smem_bytes(stage_of(p), t) <= SMEM_BYTES,
    ),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class Int8Wgmma(Family[GemmProblem, CodebookWgmmaTile]):
    """Many tokens and int8 weights of experts on ``wgmma``, for prefill.

    Arguments are ``problem.params()`` in order; n, k >= 1. a: blocks of the tokens of all places of tiles, in the order
    of tiles, k padded with zeros to a multiple of 128, as `qcut.numerics.codebook.layout.to_blocks` makes them, int8
    columns in natural order; ``m`` counts them; ``lda`` is not read. b: int8 ``[experts, n, ldb]``, 16-byte aligned,
    ldb a multiple of 16 and at least k. ``row_scale`` and rows of D are those of routes. D is stored in pieces of up to
    16 bytes that ``problem.alignment_n`` allows. The kernel is launched on `grid`, and reads everything after the
    previous one's end.

    Exactness: int8 is bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` for activations none and relu. 16-bit: int8
    to float is exact and every product is exact in float32; the tensor core adds them in an order fixed by K. A route's
    result does not depend on the others; the same inputs give the same bits.

    Source: PTX ISA, ``wgmma.mma_async``, ``cp.async``, ``cp.async.bulk``, ``mbarrier``.
    """

    name = "int8_wgmma"
    tile_type = CodebookWgmmaTile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(lambda problem, tile: smem_bytes(stage_of(problem), tile))

    def threads(self, tile: CodebookWgmmaTile) -> int:
        """Threads of three warpgroups."""
        return THREADS

    def grid(self, tile: CodebookWgmmaTile, n: int, sm_count: int = 1) -> Grid:
        """That of `CODEBOOK_WGMMA`."""
        return CODEBOOK_WGMMA.grid(tile, n, sm_count)

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[CodebookWgmmaTile, ...]:
        """Return tiles of each width of tokens, for one CTA and for two, with as many stages as fit."""
        tiles = (deepest(stage_of(problem), tokens, cluster) for tokens, cluster in _SHAPES)
        return tuple(tile for tile in tiles if holds(CONSTRAINTS, problem, tile, "sm_90a"))

    def _source(self, name: str, problem: GemmProblem, tile: CodebookWgmmaTile, arch: str) -> KernelSource:
        shape = (tile.tokens, tile.stages, tile.lead, tile.cluster, tile.splits, buffers(stage_of(problem), tile))
        align_d = gcd(problem.alignment_n * problem.epilogue.out.bits // 8, 16)
        params = problem.params()
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::WgmmaTile<{problem.a.cpp}, 8, 1, false, {', '.join(map(str, shape))}, "
            f"false, {flag(tile.fine)}>;",
            *problem.epilogue.statements(params),
            f"qcut::int8_wgmma<Tile, Epilogue, {align_d}>(reinterpret_cast<const char*>(a), b, d, m, n, k, ldb, ldd, "
            f"args, {EXPERT_ROWS});",
            device_code=include("experts/int8_wgmma.cuh"),
            block=THREADS,
            ctas_per_sm=1,
            waits=True,
            smem_bytes=self.smem_bytes(problem, tile),
            cluster=tile.cluster,
        )


INT8_WGMMA = Int8Wgmma()
