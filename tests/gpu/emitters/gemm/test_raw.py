"""The raw GEMMs, launched directly: every tile and epilogue, edges, strides, extremes; guards around D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_MMA, W8A16_MMA
from qcut.emitters.gemm.problem import K_MAX, GemmProblem, TileConfig
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import TORCH_DTYPE, Gemm, assert_same, assert_w8a16_near, full_range, pattern
from tests.gpu.support.problems import DYNAMIC, GEMM_EPILOGUES, STATIC

ROWS = (1, 15, 16, 17, 33, 129)
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
LARGE = TileConfig((128, 128, 64), (64, 64, 64), 3)
SHALLOW = TileConfig((64, 64, 64), (32, 32, 64), 2)
PER_TENSOR = Epilogue(DType.F32, zero_point="per_tensor", col_scale="per_tensor")
WEIGHT_ONLY = Epilogue(col_scale="per_channel", bias=True)
WEIGHT_ONLY_EPILOGUES = (
    WEIGHT_ONLY,
    Epilogue(),
    Epilogue(DType.F32, col_scale="per_channel"),
    Epilogue(DType.BF16, "per_token", "per_channel", bias=True, residual=True),
    Epilogue(DType.S8, "none", "per_channel", bias=True, activation=Activation.RELU),
    Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_ERF),
    Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True),
    Epilogue(DType.BF16, col_scale="per_channel", activation=Activation.SILU),
)
UNALIGNED = {"alignment_k": 1, "alignment_n": 1}


def int8_cases(arch: str) -> Iterator[KernelSource]:
    for tile in (*INT8_MMA.default_tiles(GemmProblem(), arch), SHALLOW):
        yield INT8_MMA.emit(GemmProblem(epilogue=DYNAMIC), tile, arch)
    for epilogue in (*GEMM_EPILOGUES, STATIC, PER_TENSOR):
        for tile in (SMALL, LARGE):
            yield INT8_MMA.emit(GemmProblem(epilogue=epilogue), tile, arch)
        yield INT8_MMA.emit(GemmProblem(epilogue=epilogue, alignment_n=1), SMALL, arch)
    for tile in (SMALL, LARGE, SHALLOW):
        yield INT8_MMA.emit(GemmProblem(epilogue=DYNAMIC, **UNALIGNED), tile, arch)


def w8a16_cases(arch: str) -> Iterator[KernelSource]:
    for a in (DType.F16, DType.BF16):
        for tile in (*W8A16_MMA.default_tiles(GemmProblem(DType.F16), arch), SHALLOW):
            yield W8A16_MMA.emit(GemmProblem(a=a, epilogue=WEIGHT_ONLY), tile, arch)
    for epilogue in WEIGHT_ONLY_EPILOGUES:
        for tile in (SMALL, LARGE):
            yield W8A16_MMA.emit(GemmProblem(a=DType.F16, epilogue=epilogue), tile, arch)
    for a in (DType.F16, DType.BF16):
        for tile in (SMALL, LARGE):
            yield W8A16_MMA.emit(GemmProblem(a=a, epilogue=WEIGHT_ONLY, **UNALIGNED), tile, arch)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    built = jit.build_many([*int8_cases(arch()), *w8a16_cases(arch())], progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


def run(
    gemm: Gemm, problem: GemmProblem, tile: TileConfig, *, x: Tensor | None = None, extra: int = 0, offset: int = 0
) -> Tensor:
    """`launch_gemm` of the family that takes the operand: ``x``, or int8."""
    emit = INT8_MMA.emit if x is None else W8A16_MMA.emit
    ctas = INT8_MMA.grid(tile, gemm.b.shape[0])(gemm.a.shape[0])
    return launch_gemm(gemm, problem, emit(problem, tile, arch()), ctas, x=x, extra=extra, offset=offset)


def small_integers(m: int, n: int, k: int, epilogue: Epilogue) -> Gemm:
    """A GEMM with every partial sum an integer below 2**24: float32 accumulation is exact in any order."""
    assert 8 * 128 * k < 2**24
    a = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(m)).to(torch.int8)
    return Gemm.of(epilogue, a, full_range(n, k, seed=n))


def tiles(family: Any) -> list[TileConfig]:
    """Tiles of the largest menu; what the GPU at hand lacks is left out when the test runs."""
    return [*family.default_tiles(GemmProblem(), "sm_90a"), SHALLOW]


def require_tile(family: Any, problem: GemmProblem, tile: TileConfig) -> None:
    if INT8_MMA.smem_bytes(problem, tile) > architecture(arch()).smem_bytes:
        pytest.skip(f"{tile.name} needs more shared memory than {arch()} has")
    if tile.splits > 1 and not architecture(arch()).clusters:
        pytest.skip(f"{tile.name} needs thread-block clusters; {arch()} has none")
    family.validate(problem, tile, arch())


# ── int8 ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tile", tiles(INT8_MMA), ids=lambda t: t.name)
def test_int8_tiles(tile: TileConfig) -> None:
    problem = GemmProblem(epilogue=DYNAMIC)
    require_tile(INT8_MMA, problem, tile)
    # K below one stage, fewer tiles than stages, ragged, long; N inside a tile and over several.
    for n, k in ((16, 16), (304, 272), (272, 1040)):
        for m in (*ROWS, 257):
            gemm = Gemm.random(DYNAMIC, m, n, k, seed=m)
            gemm.check(run(gemm, problem, tile))


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda t: t.name)
@pytest.mark.parametrize("epilogue", GEMM_EPILOGUES, ids=lambda e: e.name)
def test_int8_epilogues(epilogue: Epilogue, tile: TileConfig) -> None:
    for m in ROWS:
        gemm = Gemm.random(epilogue, m, 336, 400, seed=m)
        gemm.check(run(gemm, GemmProblem(epilogue=epilogue), tile, extra=16))


@pytest.mark.parametrize("epilogue", GEMM_EPILOGUES, ids=lambda e: e.name)
def test_int8_odd_n(epilogue: Epilogue) -> None:
    for m, n, extra in ((1, 1, 0), (17, 127, 0), (33, 129, 16), (129, 331, 0)):
        gemm = Gemm.random(epilogue, m, n, 144, seed=n)
        gemm.check(run(gemm, GemmProblem(epilogue=epilogue, alignment_n=1), SMALL, extra=extra))


@pytest.mark.parametrize("tile", [SMALL, LARGE, SHALLOW], ids=lambda t: t.name)
def test_int8_unaligned_operands(tile: TileConfig) -> None:
    for m, n, k, extra, offset in ((1, 1, 1, 0, 1), (15, 33, 37, 1, 3), (33, 65, 129, 0, 0), (129, 127, 500, 5, 7)):
        gemm = Gemm.random(DYNAMIC, m, n, k, seed=k)
        gemm.check(run(gemm, GemmProblem(epilogue=DYNAMIC, **UNALIGNED), tile, extra=extra, offset=offset))


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda t: t.name)
@pytest.mark.parametrize("epilogue", [STATIC, PER_TENSOR], ids=lambda e: e.name)
def test_int8_per_tensor_arguments(epilogue: Epilogue, tile: TileConfig) -> None:
    for zero_point in (-128, 0, 127):
        gemm = Gemm.random(epilogue, 33, 144, 1040)
        gemm.args["zero_point"] = zero_point
        if epilogue.col_scale == "per_tensor":
            gemm.args["col_scale"] = 0.0123
        gemm.check(run(gemm, GemmProblem(epilogue=epilogue), tile))


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "identity", "zeros", "min_times_max"])
def test_int8_extremes(kind: str, tile: TileConfig) -> None:
    epilogue = Epilogue(DType.F32)
    for k in (1040, K_MAX // 16 * 16):
        gemm = Gemm.of(epilogue, *pattern(kind, 17, 144, k))
        gemm.check(run(gemm, GemmProblem(epilogue=epilogue), tile))


def test_bad_tokens_stay_in_their_rows() -> None:
    for out in (DType.F16, DType.S8):
        epilogue = replace(DYNAMIC, out=out)
        gemm = Gemm.random(epilogue, 33, 128, 256)
        gemm.args["row_scale"][5] = float("nan")
        got = run(gemm, GemmProblem(epilogue=epilogue), SMALL)
        gemm.check(got)
        if out is DType.F16:
            assert got.isnan().any(1).nonzero().flatten().tolist() == [5]
        else:
            assert not got[5].any()


# ── int8 weights, 16-bit tokens ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
@pytest.mark.parametrize("tile", tiles(W8A16_MMA), ids=lambda t: t.name)
def test_w8a16_tiles(tile: TileConfig, a: DType) -> None:
    problem = GemmProblem(a=a, epilogue=WEIGHT_ONLY)
    require_tile(W8A16_MMA, problem, tile)
    for n, k in ((16, 16), (304, 272), (272, 1040)):
        for m in (*ROWS, 257):
            gemm = small_integers(m, n, k, WEIGHT_ONLY)
            gemm.check(run(gemm, problem, tile, x=gemm.a.to(TORCH_DTYPE[a])))


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda t: t.name)
@pytest.mark.parametrize("epilogue", WEIGHT_ONLY_EPILOGUES, ids=lambda e: e.name)
def test_w8a16_epilogues(epilogue: Epilogue, tile: TileConfig) -> None:
    for m in ROWS:
        gemm = small_integers(m, 336, 400, epilogue)
        gemm.check(run(gemm, GemmProblem(a=DType.F16, epilogue=epilogue), tile, x=gemm.a.half(), extra=16))


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda t: t.name)
def test_w8a16_unaligned(tile: TileConfig, a: DType) -> None:
    problem = GemmProblem(a=a, epilogue=WEIGHT_ONLY, **UNALIGNED)
    for m, n, k, extra, offset in ((1, 1, 1, 0, 1), (15, 33, 37, 1, 3), (33, 65, 129, 0, 0), (129, 127, 500, 5, 7)):
        gemm = small_integers(m, n, k, WEIGHT_ONLY)
        gemm.check(run(gemm, problem, tile, x=gemm.a.to(TORCH_DTYPE[a]), extra=extra, offset=offset))


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
def test_every_weight_converts_exactly(a: DType) -> None:
    """x is the identity, so D is the weights: all 256 values, in every column of K."""
    epilogue = Epilogue(DType.F32)
    weights = (torch.arange(256)[:, None] + torch.arange(128)).to(torch.uint8).view(torch.int8)
    gemm = Gemm.of(epilogue, torch.eye(128, dtype=torch.int8), weights)
    problem = GemmProblem(a=a, epilogue=epilogue)
    assert_same(run(gemm, problem, LARGE, x=torch.eye(128, dtype=TORCH_DTYPE[a])), weights.t().float())


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda t: t.name)
def test_w8a16_rounding(tile: TileConfig, a: DType) -> None:
    """Real tokens against float64."""
    m, n, k = 33, 144, 1040
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(TORCH_DTYPE[a])
    gemm = Gemm.of(WEIGHT_ONLY, torch.zeros(m, k, dtype=torch.int8), full_range(n, k))
    got = run(gemm, GemmProblem(a=a, epilogue=WEIGHT_ONLY), tile, x=x)
    assert_w8a16_near(got, x, gemm)


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(33, 528, generator=torch.Generator().manual_seed(2)).half()
    gemm = Gemm.of(WEIGHT_ONLY, torch.zeros(33, 528, dtype=torch.int8), full_range(144, 528))
    problem = GemmProblem(a=DType.F16, epilogue=WEIGHT_ONLY)
    whole = run(gemm, problem, LARGE, x=x)
    for row in (0, 16, 32):
        alone = run(gemm, problem, LARGE, x=x[row : row + 1])
        assert_same(alone[0], whole[row])


def test_nan_tokens_stay_in_their_rows() -> None:
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(3)).half()
    x[7, 100] = float("nan")
    gemm = Gemm.of(WEIGHT_ONLY, torch.zeros(33, 256, dtype=torch.int8), full_range(64, 256))
    got = run(gemm, GemmProblem(a=DType.F16, epilogue=WEIGHT_ONLY), SMALL, x=x)
    assert got.isnan().all(1).nonzero().flatten().tolist() == [7]
    assert not got[torch.arange(33) != 7].isnan().any()
