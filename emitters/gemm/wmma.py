"""Raw int8 GEMM on ``wmma::mma_sync`` m16n16k16, CUDA C++'s interface to the tensor core; any M, N, K and layout.

``D = epilogue(A B)``, as in `qcut.emitters.gemm.mma`. Device code: ``include/qcut/gemm/wmma.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qcut.emitters.core.constraints import Constraint, check, holds, shared_memory
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.tensor_core import (
    SHARED_MEMORY,
    TILE_CONSTRAINTS,
    gemm_source,
    grid,
    legal_tiles,
    staging_bytes,
)

FAMILY = "int8_wmma"
SharedLayout = Literal["blocked", "padded", "linear"]
_LAYOUTS: dict[SharedLayout, str] = {"blocked": "BlockedLayout", "padded": "PaddedLayout", "linear": "LinearLayout"}
_STAGING_PADDING = 8

__all__ = [
    "CONSTRAINTS",
    "FAMILY",
    "SharedLayout",
    "default_tiles",
    "emit_wmma_gemm",
    "grid",
    "search_space",
    "smem_bytes",
    "validate",
]

_TILE_CONSTRAINTS = (
    Constraint("operands", "are s8 x s8", lambda p, t, arch: p.a is DType.S8 and p.b is DType.S8),
    *TILE_CONSTRAINTS,
)


def _fits(shared: SharedLayout) -> Constraint:
    return shared_memory(SHARED_MEMORY, lambda problem, tile: smem_bytes(problem, tile, shared))


CONSTRAINTS = (*_TILE_CONSTRAINTS, _fits("blocked"))
"""What this family can build, on (problem, tile, arch)."""


def validate(problem: GemmProblem, tile: TileConfig, arch: str) -> None:
    """Check that this family can build a kernel for the problem with this tile on this architecture.

    Raises:
        EmitError: a constraint is broken; the message has the kernel's name and the first broken constraint.
    """
    check(procedural_name(FAMILY, arch, problem, tile), CONSTRAINTS, problem, tile, arch)


def smem_bytes(problem: GemmProblem, tile: TileConfig, shared: SharedLayout = "blocked") -> int:
    """Dynamic shared memory of a CTA: the pipeline, or the epilogue's staging where that is larger."""
    bm, bn, bk = tile.threadblock_shape
    pipeline = 0
    for extent, by_k in ((bm, problem.layout_a == "row"), (bn, problem.layout_b == "column")):
        runs, length = (extent, bk) if by_k else (bk, extent)
        pipeline += tile.stages * runs * (length + (16 if shared == "padded" else 0))
    return max(pipeline, staging_bytes(problem, tile, _STAGING_PADDING))


def default_tiles(arch: str) -> tuple[TileConfig, ...]:
    """Return tiles from decode (16 rows) to prompts, all legal on `arch`; dispatch or a tuner chooses."""
    shapes = (
        ((16, 64, 128), (16, 16), 5),
        ((32, 64, 128), (16, 32), 5),
        ((64, 64, 128), (32, 32), 4),
        ((64, 128, 128), (32, 64), 3),
        ((128, 128, 64), (64, 64), 4),
        ((128, 128, 128), (64, 64), 3),
        ((128, 256, 64), (64, 64), 4),
        ((256, 128, 64), (64, 64), 4),
        ((128, 256, 128), (64, 64), 3),
    )
    tiles = [TileConfig(block, (*warp, block[2]), stages) for block, warp, stages in shapes]
    tiles += [TileConfig((16, 64, 128), (16, 16, 128), 5, splits=splits) for splits in (2, 4, 8)]
    return tuple(tile for tile in tiles if holds(CONSTRAINTS, GemmProblem(), tile, arch))


def search_space(problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
    """Every tile a tuner may try, legal for the problem on `arch`."""
    return legal_tiles(CONSTRAINTS, problem, arch)


def emit_wmma_gemm(
    problem: GemmProblem, tile: TileConfig, arch: str, *, shared: SharedLayout = "blocked"
) -> KernelSource:
    """Text of one kernel.

    Arguments, alignments and exactness are those of `qcut.emitters.gemm.mma.emit_mma_gemm`.

    Args:
        problem: types, layouts and epilogue.
        tile: how the kernel divides the problem.
        arch: real architecture.
        shared: layout of operands in shared memory. ``blocked``: each 16 x 16 fragment is contiguous, so that its load
            is free of bank conflicts; ``padded``: rows of the tile with 16 bytes of padding; ``linear``: rows of the
            tile without padding, so that loads of fragments conflict. If an operand is not contiguous along K, the
            library loads fragments byte by byte, with conflicts in every layout.

    Raises:
        EmitError: see `validate`.

    Source: CUDA C++ Programming Guide, "Warp Matrix Functions".
    """
    name = procedural_name(FAMILY, arch, problem, tile) + ("" if shared == "blocked" else f"_{shared}")
    check(name, (*_TILE_CONSTRAINTS, _fits(shared)), problem, tile, arch)
    return gemm_source(
        name,
        problem,
        tile,
        arch,
        header="wmma",
        function="wmma_gemm",
        smem_bytes=smem_bytes(problem, tile, shared),
        first=f"qcut::{_LAYOUTS[shared]}, ",
    )
