"""Products of routes to experts with int8 weights, in tiles of up to 32 routes of one expert: decode.

``D = act((sum_k a[m, k] * b[e, n, k]) * s_a[m] * s_b[e, n] + bias[e, n])``, e the expert of a route; 16-bit tokens have
no ``s_a``. Device code: ``include/qcut/experts/int8.cuh``.
"""

from __future__ import annotations

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.experts import EXPERT_ROWS
from qcut.emitters.core.source import KernelSource
from qcut.emitters.core.text import include, kernel_source
from qcut.emitters.gemm.int8_wgmma import PROBLEM_CONSTRAINTS
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream import experts
from qcut.emitters.stream.experts import ExpertsFamily, ExpertsTile, tile_constraints

_REGISTERS, _MORE_UNITS, _MORE_TOKENS, _ONE_WARP = 76, 12, 16, 40
"""Of a thread: for addresses, counters and routes; for each further unit, for each eight further tokens; and
of a warp that is a CTA's only one, and writes all rows."""


def smem_bytes(problem: GemmProblem, tile: ExpertsTile) -> int:
    """Dynamic shared memory of a CTA."""
    return experts.smem_bytes(problem.a.bits // 8, 0, tile)


def _registers(problem: GemmProblem, tile: ExpertsTile) -> int:
    """Estimate a thread's registers, no fewer than kernels take that do not spill."""
    tiles = -(-tile.tokens // 8)
    weights, tokens = 18 * tile.units * tile.prefetch, 1.3 * tiles * (problem.a.bits * tile.units + 4)
    more = _MORE_UNITS * (tile.units - 1) + _MORE_TOKENS * (tiles - 1) + _ONE_WARP * (tile.warps == 1)
    if problem.epilogue.col_scale == "per_unit":
        more += tile.units * tile.prefetch + 4 * tiles
    return round(weights + tokens) + _REGISTERS + more


CONSTRAINTS = (
    *PROBLEM_CONSTRAINTS,
    Constraint(
        "alignment_k",
        "is that of 16 bytes of a token, as columns are",
        lambda p, t, arch: p.alignment_k % (128 // p.a.bits) == 0,
    ),
    *tile_constraints(_registers, smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class Int8Experts(ExpertsFamily[GemmProblem]):
    """Routes to experts in tiles, int8 weights, and tokens of int8 or 16 bits.

    Arguments are ``problem.params()`` in order; n >= 1, k up to ``128 * units * warps * splits``. a: rows that start at
    multiples of 16 bytes, k columns of each, which are a multiple of 16 bytes. b: int8 ``[experts, n, ldb]``, 16-byte
    aligned, ldb a multiple of 16 and at least k. m counts the places of all tiles, ``tokens`` each. A route's row of D
    is written, and no other, element by element, with any ``alignment_n``. Everything is read after the predecessor's
    end.

    Exactness: int8 is bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` for activations none and relu. 16-bit: int8
    to float is exact and every product is exact in float32; products are added in an order that K and the tile fix,
    with error at most ``K * 2**-23 * sum_k |a * b|`` before the scale. Neither the order of routes nor the number of
    tiles changes a result.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``mma.sync.m16n8k32``, ``cp.async``, ``barrier.cluster``.
    """

    name = "int8_experts"
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def _source(self, name: str, problem: GemmProblem, tile: ExpertsTile, arch: str) -> KernelSource:
        params, smem = problem.params(), smem_bytes(problem, tile)
        return kernel_source(
            name,
            arch,
            params,
            f"using Tile = qcut::StreamTile<{tile.sizes}>;",
            f"static_assert(qcut::ExpertShared<{problem.a.cpp}, Tile, false>::kBytes == {smem}, "
            '"the launch\'s shared memory");',
            *problem.epilogue.statements(params),
            f"qcut::int8_experts<{problem.a.cpp}, Tile, Epilogue>(a, b, d, m, n, k, lda, ldb, ldd, args,\n"
            f"      {EXPERT_ROWS});",
            device_code=include("experts/int8.cuh"),
            block=32 * tile.warps,
            ctas_per_sm=tile.ctas,
            waits=True,
            smem_bytes=smem,
            cluster=tile.splits,
        )


INT8_EXPERTS = Int8Experts()
