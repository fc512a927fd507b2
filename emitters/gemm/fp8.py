"""Products of e4m3 tokens and e4m3 weights on ``mma.sync.m16n8k32``, which need only NVRTC.

``D = act((sum_k a[m, k] * b[n, k]) * s_a[m] * s_w[n] + bias[n]) (+ residual)``. Device code:
``include/qcut/gemm/fp8.cuh``. The family is for sm_89 and sm_120. On sm_90a it serves machines without nvcc, and while
nvcc builds `qcut.emitters.gemm.cutlass.fp8`; there, as on sm_100, ``mma.sync`` converts e4m3 to 16 bits first.
"""

from __future__ import annotations

from qcut.emitters.core.arch import E4M3_ARCHITECTURES, architecture
from qcut.emitters.core.constraints import Constraint, shared_memory
from qcut.emitters.core.source import DType
from qcut.emitters.gemm.mma import smem_bytes
from qcut.emitters.gemm.problem import HOST_M, ONE_WEIGHT, GemmProblem, TileConfig
from qcut.emitters.gemm.tensor_core import SHARED_MEMORY, TILE_CONSTRAINTS, OperandGemm, registers

PROBLEM_CONSTRAINTS = (
    Constraint("operands", "are e4m3 x e4m3", lambda p, t, arch: p.a is DType.E4M3 and p.b is DType.E4M3),
    Constraint("layouts", "are tnt: as tokens and weights come", lambda p, t, arch: p.layouts == "tnt"),
    HOST_M,
    ONE_WEIGHT,
)
"""Constraints of all families of e4m3 tokens."""

_CONVERTED_REGISTERS = 40
"""Registers for fragments in 16 bits on sm_90a: ``mma.sync`` multiplies in 16 bits there."""


def _fits_registers(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    more = tile.warp_shape[0] * tile.warp_shape[1] // 32
    if architecture(arch).wgmma:
        more += _CONVERTED_REGISTERS
    return registers(tile) + more <= min(255, 65_536 // tile.threads)


CONSTRAINTS = (
    *PROBLEM_CONSTRAINTS,
    *TILE_CONSTRAINTS,
    Constraint("e4m3", f"needs {', '.join(E4M3_ARCHITECTURES)}", lambda p, t, arch: arch in E4M3_ARCHITECTURES),
    Constraint("scales", "sums are float32, and no unit has a scale", lambda p, t, arch: _is_scaled(p)),
    Constraint("two_sums", "the sums of 128 columns fit a thread's registers, too", _fits_registers),
    shared_memory(SHARED_MEMORY, smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""
_SHAPES = (
    ((16, 32, 128), (16, 16), 5, 1),
    ((16, 64, 128), (16, 16), 5, 1),
    ((32, 64, 128), (16, 32), 5, 1),
    ((64, 64, 128), (32, 32), 4, 1),
    ((64, 128, 128), (32, 32), 3, 1),
    ((128, 64, 128), (32, 32), 3, 1),
    ((128, 128, 128), (32, 64), 3, 1),
    ((128, 128, 64), (32, 64), 4, 1),
    ((128, 128, 64), (64, 32), 4, 1),
    ((64, 64, 128), (32, 32), 4, 2),
    ((64, 64, 128), (32, 32), 4, 4),
)


def _is_scaled(problem: GemmProblem) -> bool:
    e = problem.epilogue
    return not e.is_raw and e.zero_point == "none" and e.col_scale != "per_unit"


class FP8Mma(OperandGemm):
    """e4m3 tokens and e4m3 weights on ``mma.sync``.

    Arguments are ``problem.params()`` in order; m, n, k >= 1. Runs of A and B are copied as those of
    `qcut.emitters.gemm.mma.Int8Mma`, and so is D stored.

    Exactness: products are exact in float32. A tensor core adds 32 products and the sum before them after shifting all
    to the largest exponent, and keeps 13 bits of fraction or more. Four such steps, 128 columns, are a sum of their
    own: an error of at most ``4 * 33 * 2**-13`` of the largest magnitude among its terms and sums, before the scales.
    Sums of 128 columns are added in float32, in an order that K and the tile fix. A row's result does not depend on the
    other rows; the same inputs give the same bits.

    Source: PTX ISA, ``mma.sync.m16n8k32`` with ``.e4m3``.
    """

    name = "fp8_mma"
    header, function, shapes = "fp8", "fp8_mma", _SHAPES
    plain = GemmProblem(DType.E4M3, DType.E4M3)
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)


FP8_MMA = FP8Mma()
