"""The CUTLASS kernels, launched directly: every schedule, the SM80 main loop's every epilogue, edges, guards around D.

The operators reach only what dispatch picks; SM80's multistage kernels run here on whatever GPU there is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_CUTLASS
from qcut.emitters.gemm.problem import K_MAX, GemmProblem, TileConfig
from tests.gpu.support.launching import arch, launch_cutlass
from tests.gpu.support.oracles import Gemm, pattern
from tests.gpu.support.problems import DYNAMIC, STATIC

SM80_TILE = TileConfig((128, 128, 64), (64, 64, 64), stages=4)
SM80_TILES = (SM80_TILE, TileConfig((64, 64, 64), (32, 32, 64), stages=3), TileConfig((32, 64, 128), (32, 32, 128), 5))
SM90_TILES = (
    TileConfig((64, 128, 128), schedule="warp_specialized"),
    TileConfig((64, 160, 128), schedule="pingpong", epilogue_tile=(64, 160)),
    TileConfig((128, 128, 128), cluster_shape=(2, 1), schedule="pingpong"),
    TileConfig((128, 256, 128), cluster_shape=(1, 2), schedule="cooperative"),
    TileConfig((128, 64, 128), schedule="stream_k"),
)
SM80_EPILOGUES = (
    DYNAMIC,
    STATIC,
    Epilogue(DType.F32),
    Epilogue(DType.S8),
    Epilogue(DType.S8, "per_token", "per_channel", "per_token", bias=True),
    Epilogue(DType.S8, "per_token", "per_channel", bias=True, activation=Activation.GELU_TANH),
    Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, activation=Activation.RELU),
    Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, activation=Activation.GELU_ERF),
    Epilogue(DType.BF16, "per_token", "per_channel", "per_token", True, Activation.SILU, residual=True),
)
"""Every output type, and every part of an epilogue at least once; the operators' tests have more of them on SM90."""

ACCUMULATE = Epilogue(DType.F32, "per_token", "per_channel", residual=True)
SHAPES = ((1, 16, 16), (127, 336, 272), (129, 144, 1040), (300, 720, 512))
"""(M, N, K) below, at and beyond a tile, with and without a whole number of K tiles."""


def tiles() -> tuple[TileConfig, ...]:
    return SM80_TILES + (SM90_TILES if arch() == "sm_90a" else ())


def accumulating_tiles() -> list[TileConfig]:
    return [SM80_TILE, *(t for t in tiles() if t.schedule == "pingpong")]


def cases() -> Iterator[KernelSource]:
    for tile in tiles():
        yield INT8_CUTLASS.emit(GemmProblem(epilogue=DYNAMIC), tile, arch())
        yield INT8_CUTLASS.emit(GemmProblem(epilogue=Epilogue(DType.F32)), tile, arch())
    for epilogue in SM80_EPILOGUES:
        yield INT8_CUTLASS.emit(GemmProblem(epilogue=epilogue), SM80_TILE, arch())
    for tile in accumulating_tiles():
        yield INT8_CUTLASS.emit(GemmProblem(epilogue=ACCUMULATE), tile, arch())


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    built = jit.build_many(cases(), progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


def run(gemm: Gemm, tile: TileConfig, *, extra: int = 0, splits: int = 1) -> Tensor:
    source = INT8_CUTLASS.emit(GemmProblem(epilogue=gemm.epilogue), tile, arch())
    return launch_cutlass(gemm, source, extra=extra, splits=splits)


@pytest.mark.parametrize("extra", [0, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("tile", SM80_TILES + SM90_TILES, ids=lambda t: t.name)
def test_schedules(tile: TileConfig, shape: tuple[int, int, int], extra: int) -> None:
    if tile not in tiles():
        pytest.skip(f"{tile.schedule} exists only on sm_90a")
    gemm = Gemm.random(DYNAMIC, *shape, seed=shape[0])
    gemm.check(run(gemm, tile, extra=extra))


@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "min_times_max"])
@pytest.mark.parametrize("tile", SM80_TILES + SM90_TILES, ids=lambda t: t.name)
def test_extremes(tile: TileConfig, kind: str) -> None:
    if tile not in tiles():
        pytest.skip(f"{tile.schedule} exists only on sm_90a")
    for k in (1040, K_MAX // 16 * 16):
        gemm = Gemm.of(Epilogue(DType.F32), *pattern(kind, 17, 144, k))
        gemm.check(run(gemm, tile))


@pytest.mark.parametrize("epilogue", SM80_EPILOGUES, ids=lambda e: e.name)
def test_sm80_epilogues(epilogue: Epilogue) -> None:
    for m, extra in ((1, 0), (129, 16)):
        gemm = Gemm.random(epilogue, m, 336, 272, seed=m)
        if epilogue.zero_point == "per_tensor":
            gemm.args["zero_point"] = -128
        gemm.check(run(gemm, SM80_TILE, extra=extra))


def test_stream_k_in_parts() -> None:
    if arch() != "sm_90a":
        pytest.skip("stream-K exists only on sm_90a")
    gemm = Gemm.random(DYNAMIC, 64, 128, 4096)
    for splits in (1, 2, 4):
        gemm.check(run(gemm, SM90_TILES[-1], splits=splits))


def test_a_residual_may_be_the_output() -> None:
    """The rescale-and-accumulate form: C and D are one tensor, as a second pass over the same output has it."""
    for tile in accumulating_tiles():
        gemm = Gemm.random(ACCUMULATE, 129, 336, 272)
        a, b = gemm.a.cuda(), gemm.b.cuda()
        d = gemm.args["residual"].cuda()
        source = INT8_CUTLASS.emit(GemmProblem(epilogue=ACCUMULATE), tile, arch())
        kernel = jit.load(jit.build(source), source, 0)
        scales = [gemm.args["row_scale"].cuda(), gemm.args["col_scale"].cuda()]
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        args = [a, b, d, 129, 336, 272, 272, 272, 336, *scales, d, sm_count, 1, 0, 1, 0]
        kernel.launch((1, 1, 1), [x.data_ptr() if isinstance(x, Tensor) else x for x in args], 0)
        gemm.check(d.cpu())
