"""W8A16 GEMM: float16 or bfloat16 tokens, int8 or e4m3 weights that become 16-bit floats in registers.

``D = act((sum_k a[m, k] * b[n, k]) * s_w[n] + bias[n]) (+ residual)``, the sum in float32 on ``mma.sync.m16n8k16``.
Device code: ``include/qcut/gemm/w8a16.cuh``.
"""

from __future__ import annotations

from qcut.emitters.core.constraints import Constraint, shared_memory
from qcut.emitters.core.source import DType
from qcut.emitters.gemm.mma import smem_bytes
from qcut.emitters.gemm.problem import ONE_WEIGHT, GemmProblem
from qcut.emitters.gemm.tensor_core import SHARED_MEMORY, TILE_CONSTRAINTS, OperandGemm

PROBLEM_CONSTRAINTS = (
    Constraint(
        "operands",
        "are f16 or bf16 x s8 or e4m3",
        lambda p, t, arch: p.a in (DType.F16, DType.BF16) and p.b in (DType.S8, DType.E4M3),
    ),
    Constraint("layouts", "are tnt: as tokens and weights come", lambda p, t, arch: p.layouts == "tnt"),
    Constraint("zero_point", "is none: weights are symmetric", lambda p, t, arch: p.epilogue.zero_point == "none"),
    Constraint("raw_output", "sums are float32: D is scaled", lambda p, t, arch: not p.epilogue.is_raw),
)
"""Constraints of all families of 16-bit tokens and weights of a byte, except CUTLASS's."""
CONSTRAINTS = (
    *PROBLEM_CONSTRAINTS,
    ONE_WEIGHT,
    *TILE_CONSTRAINTS,
    Constraint("one_cta", "sums all of K: splits are 1", lambda p, t, arch: t.splits == 1),
    shared_memory(SHARED_MEMORY, smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""
_SHAPES = (
    ((16, 32, 128), (16, 16), 5, 1),
    ((16, 64, 128), (16, 16), 5, 1),
    ((32, 64, 128), (32, 16), 4, 1),
    ((64, 64, 64), (32, 32), 4, 1),
    ((64, 128, 64), (32, 64), 4, 1),
    ((128, 128, 64), (64, 64), 3, 1),
    ((128, 128, 64), (64, 32), 4, 1),
    ((128, 256, 64), (64, 64), 4, 1),
)


class W8A16Mma(OperandGemm):
    """16-bit tokens and weights of a byte on ``mma.sync``.

    Arguments are ``problem.params()`` in order. b: int8 or e4m3 ``[n, ldb]``, 16-byte aligned, ldb a multiple of 16 and
    at least k. a: where ``problem.alignment_k`` is a multiple of 2, rows start at multiples of 4, 8 or 16 bytes, the
    largest that divides so many elements, and are copied asynchronously; otherwise element by element, for any lda >=
    k. k may be anything >= 1 in both cases. D and the residual as in `qcut.emitters.gemm.mma.Int8Mma`.

    Exactness: weights to 16 bits is exact and every product is exact in float32; the tensor core adds them in an order
    fixed only by K and the tile's K, with error at most ``K * 2**-23 * sum_k |a * b|`` before the scale. A row's result
    does not depend on the other rows; the same inputs give the same bits.

    Source: PTX ISA, ``mma.sync.m16n8k16``, ``prmt``, ``cp.async``.
    """

    name = "w8a16_mma"
    header, function, shapes = "w8a16", "w8a16_mma", _SHAPES
    plain = GemmProblem(DType.F16)
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)


W8A16_MMA = W8A16Mma()
