"""Raw int8 GEMM on ``wmma::mma_sync`` m16n16k16, CUDA C++'s interface to the tensor core; any M, N, K and layout.

``D = epilogue(A B)``, as in `qcut.emitters.gemm.mma`. Device code: ``include/qcut/gemm/wmma.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

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

SharedLayout = Literal["blocked", "padded", "linear"]
_LAYOUTS: dict[SharedLayout, str] = {"blocked": "BlockedLayout", "padded": "PaddedLayout", "linear": "LinearLayout"}
_STAGING_PADDING = 8
_SHAPES = (
    ((16, 64, 128), (16, 16), 5, 1),
    ((32, 64, 128), (16, 32), 5, 1),
    ((64, 64, 128), (32, 32), 4, 1),
    ((64, 128, 128), (32, 64), 3, 1),
    ((128, 128, 64), (64, 64), 4, 1),
    ((128, 128, 128), (64, 64), 3, 1),
    ((128, 256, 64), (64, 64), 4, 1),
    ((256, 128, 64), (64, 64), 4, 1),
    ((128, 256, 128), (64, 64), 3, 1),
    ((16, 64, 128), (16, 16), 5, 2),
    ((16, 64, 128), (16, 16), 5, 4),
    ((16, 64, 128), (16, 16), 5, 8),
)


class Int8Wmma(OperandGemm):
    """Int8 products on ``wmma::mma_sync``.

    Arguments, alignments and exactness are those of `qcut.emitters.gemm.mma.Int8Mma`.

    Args:
        shared: layout of operands in shared memory. ``blocked``: each 16 x 16 fragment is contiguous, so that its load
            is free of bank conflicts; ``padded``: rows of the tile with 16 bytes of padding; ``linear``: rows of the
            tile without padding, so that loads of fragments conflict. If an operand is not contiguous along K, the
            library loads fragments byte by byte, with conflicts in every layout.

    Source: CUDA C++ Programming Guide, "Warp Matrix Functions".
    """

    name = "int8_wmma"
    header, function, shapes = "wmma", "wmma_gemm", _SHAPES

    def __init__(self, shared: SharedLayout = "blocked") -> None:
        self.shared = shared
        self.first = f"qcut::{_LAYOUTS[shared]}, "
        self.constraints = (OPERANDS, *TILE_CONSTRAINTS, shared_memory(SHARED_MEMORY, self.smem_bytes))

    def kernel_name(self, problem: GemmProblem, tile: TileConfig, arch: str) -> str:
        """The layout follows where it is not the family's own."""
        return super().kernel_name(problem, tile, arch) + ("" if self.shared == "blocked" else f"_{self.shared}")

    def smem_bytes(self, problem: GemmProblem, tile: TileConfig) -> int:
        """Dynamic shared memory of a CTA: the pipeline, or the epilogue's staging where that is larger."""
        bm, bn, bk = tile.threadblock_shape
        pipeline = 0
        for extent, by_k in ((bm, problem.layout_a == "row"), (bn, problem.layout_b == "column")):
            runs, length = (extent, bk) if by_k else (bk, extent)
            pipeline += tile.stages * runs * (length + (16 if self.shared == "padded" else 0))
        return max(pipeline, staging_bytes(problem, tile, _STAGING_PADDING))

    def search_space(self, problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
        """Every tile a tuner may try, legal for the problem on `arch`."""
        return legal_tiles(self.constraints, problem, arch)


INT8_WMMA = Int8Wmma()
