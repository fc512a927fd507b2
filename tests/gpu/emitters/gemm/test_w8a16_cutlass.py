"""CUTLASS's products of 16-bit tokens, launched directly: every tile, type and epilogue, edges, guards around D."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import W8A16_CUTLASS
from qcut.emitters.gemm.cutlass.w8a16 import MENU
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from tests.gpu.support.launching import launch_cutlass
from tests.gpu.support.oracles import TORCH_DTYPE, Gemm, assert_same, assert_w8a16_near, full_range

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("wgmma exists only on sm_90a", allow_module_level=True)

LARGE = MENU[-1]
WHOLE = Epilogue(col_scale="per_channel", bias=True)
EPILOGUES = (
    Epilogue(DType.F32),
    Epilogue(DType.BF16, bias=True),
    Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH),
)
TOKENS = (DType.F16, DType.BF16)
SHAPES = ((1, 16, 16), (17, 336, 272), (129, 144, 1040), (257, 272, 400), (300, 720, 512))
"""(M, N, K) below, at and beyond a tile, with and without a whole number of K tiles."""


def source(a: DType, epilogue: Epilogue, tile: TileConfig, b: DType = DType.S8) -> KernelSource:
    return W8A16_CUTLASS.emit(GemmProblem(a=a, b=b, epilogue=epilogue, alignment_k=8), tile, "sm_90a")


def cases() -> Iterator[KernelSource]:
    for a in TOKENS:
        for tile in MENU:
            yield source(a, WHOLE, tile)
    for epilogue in EPILOGUES:
        yield source(DType.F16, epilogue, LARGE)
    yield source(DType.BF16, Epilogue(DType.F32), LARGE)
    yield from (source(a, Epilogue(DType.F32), tile, DType.E4M3) for a in TOKENS for tile in MENU)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    built = jit.build_many(cases(), progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


def run(gemm: Gemm, a: DType, tile: TileConfig, x: Tensor, extra: int = 0) -> Tensor:
    return launch_cutlass(gemm, source(a, gemm.epilogue, tile), x=x, extra=extra)


def small_integers(m: int, n: int, k: int, epilogue: Epilogue) -> Gemm:
    """A GEMM with every partial sum an integer below 2**24: float32 accumulation is exact in any order."""
    assert 8 * 128 * k < 2**24
    a = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(m)).to(torch.int8)
    return Gemm.of(epilogue, a, full_range(n, k, seed=n))


@pytest.mark.parametrize("extra", [0, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize(("a", "tile"), [(a, t) for a in TOKENS for t in MENU], ids=str)
def test_tiles(a: DType, tile: TileConfig, shape: tuple[int, int, int], extra: int) -> None:
    gemm = small_integers(*shape, WHOLE)
    gemm.check(run(gemm, a, tile, gemm.a.to(TORCH_DTYPE[a]), extra))


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_epilogues(epilogue: Epilogue) -> None:
    for m, extra in ((1, 0), (129, 16), (300, 0)):
        gemm = small_integers(m, 336, 400, epilogue)
        gemm.check(run(gemm, DType.F16, LARGE, gemm.a.half(), extra))


@pytest.mark.parametrize("a", TOKENS, ids=lambda a: a.value)
def test_every_weight_converts_exactly(a: DType) -> None:
    """x is the identity, so D is the weights: all 256 values, in every column of K."""
    weights = (torch.arange(256)[:, None] + torch.arange(128)).to(torch.uint8).view(torch.int8)
    gemm = Gemm.of(Epilogue(DType.F32), torch.eye(128, dtype=torch.int8), weights)
    assert_same(run(gemm, a, LARGE, torch.eye(128, dtype=TORCH_DTYPE[a])), weights.t().float())


@pytest.mark.parametrize(("a", "tile"), [(a, t) for a in TOKENS for t in MENU], ids=str)
def test_every_e4m3_converts_exactly(a: DType, tile: TileConfig) -> None:
    """Like int8 weights above; code 0 takes the place of -0, which no sum is, and of both that are NaN."""
    codes = (torch.arange(256)[:, None] + torch.arange(128)).to(torch.uint8)
    codes[((codes & 127) == 127) | (codes == 128)] = 0
    gemm = Gemm.of(Epilogue(DType.F32), torch.eye(128, dtype=torch.int8), codes.view(torch.int8))
    kernel = source(a, gemm.epilogue, tile, DType.E4M3)
    got = launch_cutlass(gemm, kernel, x=torch.eye(128, dtype=TORCH_DTYPE[a]))
    assert_same(got, codes.view(torch.float8_e4m3fn).t().float())


@pytest.mark.parametrize("a", TOKENS, ids=lambda a: a.value)
def test_rounding(a: DType) -> None:
    """Real tokens against float64."""
    m, n, k = 257, 144, 1040
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(TORCH_DTYPE[a])
    gemm = Gemm.of(WHOLE, torch.zeros(m, k, dtype=torch.int8), full_range(n, k))
    got = run(gemm, a, LARGE, x)
    assert_w8a16_near(got, x, gemm)


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(300, 528, generator=torch.Generator().manual_seed(2)).half()
    x[7, 100] = float("nan")
    gemm = Gemm.of(WHOLE, torch.zeros(300, 528, dtype=torch.int8), full_range(144, 528))
    whole = run(gemm, DType.F16, LARGE, x)
    assert whole.isnan().all(1).nonzero().flatten().tolist() == [7]
    for row in (0, 6, 255, 299):
        assert_same(run(gemm, DType.F16, LARGE, x[row : row + 1])[0], whole[row])
