"""Raw int8 GEMM on ``mma.sync.m16n8k32`` for any M, N, K and layout. The kernels need only NVRTC.

``D = epilogue(A B)``, A ``[M, K]`` and B ``[K, N]`` int8. Device code: ``include/qcut/gemm/mma.cuh`` over ``gemm.cuh``
(tiles, pipeline) and ``epilogue.cuh``. The family serves machines without nvcc or g++, and problems that the CUTLASS
kernels do not take: other layouts, odd sizes, raw accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcut.emitters.core.constraints import shared_memory
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.tensor_core import (
    OPERANDS,
    SHARED_MEMORY,
    TILE_CONSTRAINTS,
    OperandGemm,
    legal_tiles,
    staging_bytes,
)


def smem_bytes(problem: GemmProblem, tile: TileConfig) -> int:
    """Dynamic shared memory of a CTA: the pipeline, or the epilogue's staging where that is larger."""
    bm, bn, bk = tile.threadblock_shape
    pipeline = tile.stages * bk * (bm * problem.a.bits + bn * problem.b.bits) // 8
    return max(pipeline, staging_bytes(problem, tile))


CONSTRAINTS = (
    OPERANDS,
    *TILE_CONSTRAINTS,
    shared_memory(SHARED_MEMORY, smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


_SHAPES = (
    ((16, 32, 128), (16, 16), 5, 1),
    ((16, 64, 128), (16, 16), 5, 1),
    ((16, 128, 128), (16, 32), 5, 1),
    ((32, 64, 128), (16, 32), 5, 1),
    ((32, 128, 128), (32, 32), 4, 1),
    ((128, 32, 128), (32, 32), 4, 1),
    ((64, 64, 128), (32, 32), 4, 1),
    ((64, 128, 128), (32, 64), 3, 1),
    ((128, 64, 128), (64, 32), 3, 1),
    ((128, 128, 64), (64, 64), 4, 1),
    ((128, 128, 128), (64, 64), 3, 1),
    ((128, 128, 128), (64, 32), 3, 1),
    ((128, 256, 64), (64, 64), 4, 1),
    ((256, 128, 64), (64, 64), 4, 1),
    ((128, 256, 128), (64, 64), 3, 1),
    ((256, 128, 128), (64, 64), 3, 1),
    # For fewer tiles than SMs: decode, tall and flat products.
    ((16, 64, 128), (16, 16), 5, 2),
    ((16, 64, 128), (16, 16), 5, 4),
    ((16, 64, 128), (16, 16), 5, 8),
    ((16, 128, 128), (16, 32), 5, 4),
    ((32, 64, 128), (16, 32), 5, 4),
    ((64, 64, 128), (32, 32), 4, 2),
    ((64, 64, 128), (32, 32), 4, 4),
    ((64, 64, 128), (32, 32), 4, 8),
    ((128, 64, 128), (64, 32), 3, 4),
    ((64, 128, 128), (32, 64), 3, 2),
    ((128, 128, 128), (64, 32), 3, 2),
)


class Int8Mma(OperandGemm):
    """Int8 products on ``mma.sync``, in NVRTC's kernels.

    Arguments are ``problem.params()`` in order; m, n, k >= 1. A leading dimension is the distance between contiguous
    runs (rows of a row-major operand, columns of another one) in elements, at least their length. Where
    ``problem.alignment_k`` is a multiple of 4, runs of A and B start and end at multiples of 4, 8 or 16 bytes, the
    largest that divides it, and are copied asynchronously; otherwise byte by byte, from anywhere. D is stored in
    pieces of up to 16 bytes that ``problem.alignment_n`` elements allow. The residual has D's layout and leading
    dimension.

    Exactness: bitwise equal to ``qcut.numerics.int8.gemm_s8_ref`` for activations none and relu; the others differ by
    the ulps of CUDA's erff, tanhf and expf. Independent of the grid, the tile, the splits and the other rows.

    Source: PTX ISA, ``mma.sync.m16n8k32``, ``ldmatrix``, ``cp.async``, ``barrier.cluster``, ``mapa``.
    """

    name = "int8_mma"
    header, function, shapes = "mma", "mma_gemm", _SHAPES
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def search_space(self, problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
        """Every tile a tuner may try, legal for the problem on `arch`."""
        return legal_tiles(CONSTRAINTS, problem, arch)


INT8_MMA = Int8Mma()
