"""Products of many 16-bit tokens with weights of a byte on sm_90a: CUTLASS's main loop of mixed types.

The kernel computes the transpose of D. Weights are its rows: int8 or e4m3, from shared memory to registers, where they
become 16-bit floats, the first operand of ``wgmma``. Tokens are its columns, read from shared memory. A tile is given
as all tiles are, tokens first. Epilogue node: ``include/qcut/cutlass/sm90_dequantize_transposed.cuh``.

Source: CUTLASS 4.2.0, ``cutlass/gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized_mixed_input.hpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import ARCHITECTURE, Constraint, shared_memory
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.cutlass.text import WGMMA_N, Operands, emit, sm90_defines
from qcut.emitters.gemm.cutlass.tiles import tile
from qcut.emitters.gemm.problem import HOST_M, ONE_WEIGHT, GemmProblem, Schedule, TileConfig

MENU: tuple[TileConfig, ...] = (
    tile("pingpong", "128x64x64"),
    tile("pingpong", "256x64x64 c1x2"),
    tile("cooperative", "256x128x64 c1x2"),
)
"""Tiles for sizes that are not tuned. Few, because each tile is built on first use."""

SPACE: dict[Schedule, tuple[str, ...]] = {
    "cooperative": (
        "256x128x64 c1x2", "256x128x64", "256x128x64 c2x1", "256x128x128 c1x2", "224x128x64 c1x2", "192x128x64 c1x2",
        "160x128x64 c1x2", "128x128x64 c1x2", "128x128x64", "128x128x128 c1x2", "128x256x64 c2x1", "96x128x128 c1x2",
    ),
    "pingpong": (
        "256x64x64 c1x2", "192x64x64 c1x2", "160x64x64", "128x64x64", "128x64x128 c1x2", "64x64x64", "64x64x128",
    ),
}  # fmt: skip
"""The tiles worth a build of half a minute."""


def consumers(tile: TileConfig) -> int:
    """Warpgroups that share a tile of D."""
    return 2 if tile.schedule == "cooperative" else 1


def operand_bytes(problem: GemmProblem, tile: TileConfig) -> int:
    """Bytes of one stage of operands."""
    tokens, channels, k = tile.threadblock_shape
    return (tokens * problem.a.bits + channels * problem.b.bits) * k // 8


TRANSPOSED_TILE = (
    Constraint("wgmma", "needs sm_90a", lambda p, t, arch: architecture(arch).wgmma),
    Constraint(
        "schedule",
        "is pingpong or cooperative, and fixes the warps",
        lambda p, t, arch: t.schedule in ("pingpong", "cooperative") and not any(t.warp_shape),
    ),
    Constraint("splits", "are 1: a CTA sums all of K", lambda p, t, arch: t.splits == 1),
    Constraint(
        "threadblock_shape",
        "has a wgmma width of tokens, and 64, 128 or 256 channels",
        lambda p, t, arch: t.threadblock_shape[0] in WGMMA_N and t.threadblock_shape[1] in (64, 128, 256),
    ),
    Constraint(
        "cooperative",
        "takes 64 channels for each of two warpgroups",
        lambda p, t, arch: t.threadblock_shape[1] >= 64 * consumers(t),
    ),
    Constraint(
        "registers",
        "hold 128 sums a thread next to the weights",
        lambda p, t, arch: t.threadblock_shape[0] * t.threadblock_shape[1] <= 128 * 128 * consumers(t),
    ),
    Constraint(
        "cluster_shape",
        "has sides of 1, 2 or 4, 8 CTAs at most",
        lambda p, t, arch: (
            all(side in (1, 2, 4) for side in t.cluster_shape) and t.cluster_shape[0] * t.cluster_shape[1] <= 8
        ),
    ),
    Constraint("epilogue_tile", "is CUTLASS's choice", lambda p, t, arch: not any(t.epilogue_tile)),
)
"""Constraints of tiles of kernels that compute the transpose of D; each takes (problem, tile, arch)."""

CONSTRAINTS = (
    ARCHITECTURE,
    Constraint(
        "operands",
        "are f16 or bf16 x s8 or e4m3",
        lambda p, t, arch: p.a in (DType.F16, DType.BF16) and p.b in (DType.S8, DType.E4M3),
    ),
    Constraint("layouts", "are tnt: as tokens and weights come", lambda p, t, arch: p.layouts == "tnt"),
    HOST_M,
    ONE_WEIGHT,
    Constraint("alignment_k", "rows of tokens are multiples of 16 bytes", lambda p, t, arch: p.alignment_k % 8 == 0),
    Constraint(
        "alignment_n",
        "rows of D are multiples of 16 bytes",
        lambda p, t, arch: p.alignment_n * p.epilogue.out.bits >= 128,
    ),
    Constraint(
        "epilogue",
        "scales channels or nothing, without zero point or residual, to f16, bf16 or f32",
        lambda p, t, arch: (
            p.epilogue.out in (DType.F16, DType.BF16, DType.F32)
            and p.epilogue.row_scale == p.epilogue.zero_point == "none"
            and p.epilogue.col_scale in ("none", "per_channel")
            and not p.epilogue.residual
        ),
    ),
    *TRANSPOSED_TILE,
    Constraint("k", "is 64 or 128 a stage", lambda p, t, arch: t.threadblock_shape[2] in (64, 128)),
    shared_memory("two stages of operands", lambda p, t: 2 * operand_bytes(p, t)),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


def swapped(tile: TileConfig) -> TileConfig:
    """The tile in the terms of a kernel that computes the transpose of D."""
    tokens, channels, k = tile.threadblock_shape
    return replace(tile, threadblock_shape=(channels, tokens, k), cluster_shape=tile.cluster_shape[::-1])


class W8A16Cutlass(Family[GemmProblem, TileConfig]):
    """16-bit tokens and weights of a byte in CUTLASS's kernels.

    Arguments are ``problem.params()`` and `qcut.emitters.gemm.cutlass.text.LAUNCH_PARAMS`. All addresses, lda, ldb and
    ldd are multiples of 16 bytes, k is a multiple of 16; m is any.

    Exactness: a weight is exact as a 16-bit float and every product is exact in float32; the tensor core adds them in
    an order fixed only by K and the tile's K, with error at most ``K * 2**-23 * sum_k |a * b|`` before the scale. A
    row's result does not depend on the other rows; the same inputs give the same bits.

    Raises:
        EmitError: see `validate`; reading the texts, nvidia-cutlass cannot be imported.
    """

    name = "w8a16_cutlass"
    tile_type = TileConfig
    constraints = CONSTRAINTS

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[TileConfig, ...]:
        """Return the menu of an architecture; `validate` tells which tiles suit a problem."""
        return MENU if architecture(arch).wgmma else ()

    def search_space(self, problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
        """Return every tile a tuner may try for a problem."""
        tiles = (tile(schedule, spec) for schedule, specs in SPACE.items() for spec in specs)
        return (tile for tile in tiles if self.is_legal(problem, tile, arch))

    def _source(self, name: str, problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
        operands = Operands(problem.b.value, problem.a.value, DType.F32, instruction_k=16, transposed=True)
        inner = swapped(tile)
        return emit(name, operands, problem.epilogue, inner, arch, problem.params(), defines=sm90_defines(inner))


W8A16_CUTLASS = W8A16Cutlass()
