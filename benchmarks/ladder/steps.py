"""The steps of the ladder as data: the candidate kernels of each step for an architecture and a size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.ladder.kernels import NAIVE, REGISTERS, SHARED, WMMA, LadderTile, Unit, emit_ladder_gemm, grid
from qcut.dispatch.gpus import Target
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_CUTLASS, INT8_DP4A, INT8_MMA, INT8_WMMA
from qcut.emitters.gemm.cutlass import tiles as cutlass_tiles
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.wmma import Int8Wmma

PROBLEM = GemmProblem(epilogue=Epilogue(DType.S8, col_scale="per_channel"))
"""What all steps compute: ``clamp(rne(acc * col_scale[n] * out_inv_scale) + out_zero_point)``."""
LIBRARY = "cublaslt"
"""The last step, which is no kernel of ours."""


@dataclass(frozen=True)
class Candidate:
    """One kernel that a step may be.

    Attributes:
        source: the kernel.
        grid: CTAs of its launch; a host launcher knows its own.
        tail: arguments after the epilogue's.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    tail: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: name in rows and files.
        title: name in tables, for readers.
        candidates: of (m, n, k) on a GPU; the fastest is the step. Empty where the GPU has none.
        unit: the arithmetic unit whose measured peak the step is compared with.
    """

    name: str
    title: str
    candidates: Callable[[int, int, int, Target], Iterator[Candidate]]
    unit: Unit | None = None


def _rung(tile: LadderTile) -> Callable[[int, int, int, Target], Iterator[Candidate]]:
    def candidates(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
        yield Candidate(emit_ladder_gemm(PROBLEM, tile, gpu.arch), grid(tile, m, n, k))

    return candidates


def _large(tiles: tuple[Any, ...]) -> Iterator[Any]:
    """Return the tiles of a menu that suit large products."""
    for tile in tiles:
        bm, bn, _ = tile.threadblock_shape
        if bm * bn >= 128 * 128 and getattr(tile, "splits", 1) == 1:
            yield tile


def _dp4a(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
    for tile in _large(INT8_DP4A.default_tiles(GemmProblem(), gpu.arch)):
        yield Candidate(INT8_DP4A.emit(PROBLEM, tile, gpu.arch), INT8_DP4A.grid(tile, n)(m))


def _wmma_double(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
    bm, bn, bk = WMMA.threadblock_shape  # nothing but the pipeline changes
    tile = TileConfig((bm, bn, bk), (64, 64, bk), stages=2)
    source = Int8Wmma("linear").emit(PROBLEM, tile, gpu.arch)
    yield Candidate(source, INT8_WMMA.grid(tile, n)(m))


def _wmma_blocked(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
    for tile in _large(INT8_WMMA.default_tiles(GemmProblem(), gpu.arch)):
        yield Candidate(INT8_WMMA.emit(PROBLEM, tile, gpu.arch), INT8_WMMA.grid(tile, n)(m))


def _mma_sync(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
    for tile in _large(INT8_MMA.default_tiles(GemmProblem(), gpu.arch)):
        yield Candidate(INT8_MMA.emit(PROBLEM, tile, gpu.arch), INT8_MMA.grid(tile, n)(m))


SM90_TILES = (("128x128x128", 4, 1), ("64x256x128 c2x1", 8, 1))
"""Ping-pong tiles with the stripes and direction of their walk."""


def _cutlass(tile: TileConfig, gpu: Target, swizzle: int = 1, raster: int = 0) -> Candidate:
    tail = (gpu.sm_count, swizzle, raster, 1, 0)
    return Candidate(INT8_CUTLASS.emit(PROBLEM, tile, gpu.arch), (1, 1, 1), tail)


def _cutlass_sm80(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
    for tile in _large(cutlass_tiles.SM80_MENU):
        yield _cutlass(tile, gpu)


def _cutlass_sm90(m: int, n: int, k: int, gpu: Target) -> Iterator[Candidate]:
    if architecture(gpu.arch).wgmma:
        for spec, swizzle, raster in SM90_TILES:
            yield _cutlass(cutlass_tiles.tile("pingpong", spec), gpu, swizzle, raster)


STEPS = (
    Step("naive", "naive: a thread per element", _rung(NAIVE)),
    Step("shared", "tiles in shared memory", _rung(SHARED)),
    Step("registers", "tiles in registers", _rung(REGISTERS)),
    Step("dp4a", "dp4a, warp tiles, two buffers", _dp4a, "dp4a"),
    Step("wmma_single", "WMMA, one buffer", _rung(WMMA), "mma"),
    Step("wmma_double", "WMMA, cp.async into two buffers", _wmma_double, "mma"),
    Step("wmma_blocked", "WMMA, no bank conflicts, more stages", _wmma_blocked, "mma"),
    Step("mma_sync", "mma.sync and ldmatrix", _mma_sync, "mma"),
    Step("cutlass_sm80", "CUTLASS SM80 multistage", _cutlass_sm80, "mma"),
    Step("cutlass_sm90", "CUTLASS SM90 ping-pong (wgmma, TMA)", _cutlass_sm90),
)
"""From the bottom up; `LIBRARY` comes after them."""
NAMES = (*(step.name for step in STEPS), LIBRARY)


def is_cutlass(step: Step) -> bool:
    """Whether building the step takes nvcc and g++."""
    return step.name.startswith("cutlass")
