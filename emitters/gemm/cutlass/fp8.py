"""Products of many e4m3 tokens with e4m3 weights on sm_90a: CUTLASS's main loops of 8-bit floats.

The kernel computes the transpose of D, as `qcut.emitters.gemm.cutlass.w8a16` does: weights are its rows, tokens its
columns, both read from shared memory by ``wgmma``. A tile is given as all tiles are, tokens first. Epilogue node:
``include/qcut/cutlass/sm90_dequantize_transposed.cuh``.

Source: CUTLASS 4.2.0, ``cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp`` and, with ``fast``,
``sm90_mma_tma_gmma_ss_warpspecialized.hpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import ARCHITECTURE, Constraint, shared_memory
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import FLOATS, DType, KernelSource
from qcut.emitters.gemm.cutlass.text import Operands, emit, sm90_defines
from qcut.emitters.gemm.cutlass.tiles import tile
from qcut.emitters.gemm.cutlass.w8a16 import TRANSPOSED_TILE, consumers, operand_bytes, swapped
from qcut.emitters.gemm.fp8 import PROBLEM_CONSTRAINTS
from qcut.emitters.gemm.problem import GemmProblem, Schedule, TileConfig

MENU: tuple[TileConfig, ...] = (
    tile("pingpong", "32x64x128"),
    tile("pingpong", "64x64x128"),
    tile("pingpong", "64x128x128"),
    tile("cooperative", "128x128x128"),
    tile("cooperative", "192x128x128"),
)
"""Tiles for sizes that are not tuned. Few, because each tile is built on first use."""

SPACE: dict[Schedule, tuple[str, ...]] = {
    "cooperative": (
        "64x128x128", "64x128x128 c1x2", "96x128x128 c1x2", "128x128x128", "128x128x128 c1x2", "128x128x128 c2x1",
        "160x128x128 c1x2", "192x128x128", "192x128x128 c1x2", "192x128x128 c2x1", "64x256x128", "64x256x128 c2x1",
        "96x256x128 c2x1", "256x128x128 c1x2", "128x256x128 c2x1",
    ),
    "pingpong": (
        "32x64x128", "64x64x128", "64x64x128 c1x2", "128x64x128", "128x64x128 c1x2", "192x64x128 c1x2", "64x128x128",
        "64x128x128 c1x2", "96x128x128 c1x2", "256x64x128 c1x2", "128x128x128 c1x2",
    ),
}  # fmt: skip
"""The tiles worth a build of half a minute, each also with ``fast``."""

RUN = 512
"""Columns that the tensor core adds with its own bits: as many as leave errors below a 16-bit float's rounding."""

SUM_REGISTERS = 192
"""Registers of a thread for sums."""


def sums(tile: TileConfig) -> int:
    """Sums of a thread, in float32; those of `RUN` columns are apart unless the tile is ``fast``."""
    tokens, channels, _ = tile.threadblock_shape
    return tokens * channels // (128 * consumers(tile)) * (1 if tile.fast else 2)


CONSTRAINTS = (
    ARCHITECTURE,
    *PROBLEM_CONSTRAINTS,
    Constraint("alignment_k", "rows of A and B are multiples of 16 bytes", lambda p, t, arch: p.alignment_k % 16 == 0),
    Constraint(
        "alignment_n",
        "rows of D are multiples of 16 bytes",
        lambda p, t, arch: p.alignment_n * p.epilogue.out.bits >= 128,
    ),
    Constraint(
        "epilogue",
        "scales tokens, channels or nothing, without zero point or residual, to f16, bf16 or f32",
        lambda p, t, arch: (
            p.epilogue.out in FLOATS
            and p.epilogue.zero_point == "none"
            and p.epilogue.col_scale in ("none", "per_channel")
            and not p.epilogue.residual
        ),
    ),
    *(constraint for constraint in TRANSPOSED_TILE if constraint.name != "registers"),
    Constraint("sums", f"of a thread are {SUM_REGISTERS} at most", lambda p, t, arch: sums(t) <= SUM_REGISTERS),
    Constraint("k", "is 128 a stage, a row of shared memory", lambda p, t, arch: t.threadblock_shape[2] == 128),
    shared_memory("two stages of operands", lambda p, t: 2 * operand_bytes(p, t)),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


class FP8Cutlass(Family[GemmProblem, TileConfig]):
    """e4m3 tokens and e4m3 weights in CUTLASS's kernels.

    Arguments are ``problem.params()`` and `qcut.emitters.gemm.cutlass.text.LAUNCH_PARAMS`. All addresses, lda, ldb and
    ldd are multiples of 16 bytes, k is a multiple of 16; m is any.

    Exactness: products are exact in float32. The tensor core adds 32 products and the sum before them after shifting
    all to the largest exponent, and keeps 13 bits of fraction: an error of at most ``33 * 2**-13`` of the largest
    magnitude among them. Sixteen such steps, 512 columns, are a sum of their own, and these sums are added in float32:
    in all at most ``(2**-3 + K * 2**-30) * sum_k |a * b|`` before the scales, if all errors had one sign and sums the
    size of their largest; of random tokens it is about ``2**-13 * sqrt(sum_k (a * b)**2)`` a step. With ``fast`` the
    tensor core keeps one sum for all of K, and the error grows with K. The order is fixed by K; a row's result does not
    depend on the other rows; the same inputs give the same bits.

    Source: bits of the tensor core's sums: "DeepSeek-V3 Technical Report", section 3.3.2.

    Raises:
        EmitError: see `validate`; reading the texts, nvidia-cutlass cannot be imported.
    """

    name = "fp8_cutlass"
    tile_type = TileConfig
    constraints = CONSTRAINTS

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[TileConfig, ...]:
        """Return the menu of an architecture; `validate` tells which tiles suit a problem."""
        return MENU if architecture(arch).wgmma else ()

    def search_space(self, problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
        """Return every tile a tuner may try for a problem: none is ``fast``, since its results differ."""
        tiles = (tile(schedule, spec) for schedule, specs in SPACE.items() for spec in specs)
        return (tile for tile in tiles if self.is_legal(problem, tile, arch))

    def fast_space(self, problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
        """Return the tiles of `SPACE` with ``fast``, for measurements."""
        tiles = (replace(tile(schedule, spec), fast=True) for schedule, specs in SPACE.items() for spec in specs)
        return (tile for tile in tiles if self.is_legal(problem, tile, arch))

    def _source(self, name: str, problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
        run = None if tile.fast else RUN
        operands = Operands(problem.b.value, problem.a.value, DType.F32, instruction_k=32, transposed=True, run=run)
        inner = swapped(tile)
        return emit(name, operands, problem.epilogue, inner, arch, problem.params(), defines=sm90_defines(inner))


FP8_CUTLASS = FP8Cutlass()
