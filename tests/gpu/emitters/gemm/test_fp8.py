"""Products of e4m3 tokens and weights, launched directly: every tile, epilogues, edges, guards around D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import FP8_CUTLASS, FP8_MMA
from qcut.emitters.gemm.cutlass.fp8 import MENU, RUN
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from tests.gpu.support.launching import arch, launch_cutlass, launch_gemm
from tests.gpu.support.oracles import Gemm, assert_same

if torch.cuda.is_available() and not architecture(arch()).e4m3:
    pytest.skip("qcut has products of e4m3 for sm_89, sm_90a and sm_120", allow_module_level=True)

E4M3 = torch.float8_e4m3fn
WHOLE = Epilogue(DType.BF16, "per_token", "per_channel", bias=True)
EPILOGUES = (
    Epilogue(DType.F32),
    Epilogue(DType.F16, col_scale="per_channel"),
    Epilogue(DType.F32, "per_token", "per_channel", bias=True, activation=Activation.RELU),
    Epilogue(DType.F16, "per_token", "per_channel", activation=Activation.GELU_TANH),
)
SHAPES = ((1, 16, 16), (17, 336, 272), (129, 144, 1040), (257, 272, 400), (300, 720, 512))
"""(M, N, K) below, at and beyond a tile, with and without a whole number of K tiles."""
FAST = replace(MENU[-1], fast=True)
WGMMA_TILES = (*MENU, FAST)
MMA_TILES = tuple(FP8_MMA.default_tiles(GemmProblem(DType.E4M3, DType.E4M3), "sm_120"))
"""Those that the GPU at hand lacks are left out when a test runs."""
SMALL = MMA_TILES[0]


def problem(epilogue: Epilogue, **alignments: int) -> GemmProblem:
    return GemmProblem(DType.E4M3, DType.E4M3, epilogue, **alignments)


def has(tile: TileConfig) -> bool:
    family = FP8_MMA if tile.schedule == "multistage" else FP8_CUTLASS
    return family.is_legal(problem(WHOLE), tile, arch())


def source(epilogue: Epilogue, tile: TileConfig, **alignments: int) -> KernelSource:
    family = FP8_MMA if tile.schedule == "multistage" else FP8_CUTLASS
    return family.emit(problem(epilogue, **alignments), tile, arch())


def cases() -> Iterator[KernelSource]:
    """The kernels that need nvcc."""
    if has(MENU[-1]):
        yield from (source(WHOLE, tile) for tile in WGMMA_TILES)
        yield from (source(epilogue, MENU[-1]) for epilogue in EPILOGUES)
        yield from (source(Epilogue(DType.F32), tile) for tile in WGMMA_TILES)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    built = jit.build_many([*cases(), *(source(WHOLE, tile) for tile in MMA_TILES if has(tile))], progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


def run(gemm: Gemm, a: Tensor, b: Tensor, tile: TileConfig, extra: int = 0, **alignments: int) -> Tensor:
    """The epilogue of a GEMM on operands of e4m3; what lies between their rows is NaN."""
    if not has(tile):
        pytest.skip(f"{arch()} has no tile {tile.name}")
    given, kernel = replace(gemm, a=a.view(torch.int8), b=b.view(torch.int8)), source(gemm.epilogue, tile, **alignments)
    if tile.schedule != "multistage":
        return launch_cutlass(given, kernel, extra=extra)
    ctas = FP8_MMA.grid(tile, len(b))(len(a))
    return launch_gemm(given, problem(gemm.epilogue, **alignments), kernel, ctas, extra=extra)


def small_integers(m: int, n: int, k: int, epilogue: Epilogue) -> tuple[Gemm, Tensor, Tensor]:
    """A GEMM of integers with all sums exact: below 2**13, which 14 bits hold."""
    low = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-8, 9, (rows, k), generator=low).to(torch.int8) for rows in (m, n))
    return Gemm.of(epilogue, a, b), a.float().to(E4M3), b.float().to(E4M3)


def floats(rows: int, k: int, seed: int) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).mul(20).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize("extra", [0, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("tile", [*WGMMA_TILES, *MMA_TILES], ids=lambda tile: tile.name)
def test_tiles(tile: TileConfig, shape: tuple[int, int, int], extra: int) -> None:
    gemm, a, b = small_integers(*shape, WHOLE)
    gemm.check(run(gemm, a, b, tile, extra))


@pytest.mark.parametrize("tile", [MENU[-1], SMALL], ids=lambda tile: tile.name)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_epilogues(epilogue: Epilogue, tile: TileConfig) -> None:
    for m, extra in ((1, 0), (129, 16), (300, 0)):
        gemm, a, b = small_integers(m, 336, 400, epilogue)
        gemm.check(run(gemm, a, b, tile, extra))


def test_rows_of_any_length_and_place() -> None:
    for m, n, k in ((1, 1, 1), (17, 37, 21), (33, 65, 259)):
        gemm, a, b = small_integers(m, n, k, WHOLE)
        gemm.check(run(gemm, a, b, SMALL, alignment_k=1, alignment_n=1))


@pytest.mark.parametrize("tile", [*MENU, SMALL], ids=lambda tile: tile.name)
def test_every_value_is_multiplied_exactly(tile: TileConfig) -> None:
    """A is the identity, so D is the weights; code 0 takes the place of -0, which no sum is, and of both NaN."""
    codes = (torch.arange(256)[:, None] + torch.arange(128)).to(torch.uint8)
    codes[((codes & 127) == 127) | (codes == 128)] = 0
    a, b = torch.eye(128).to(E4M3), codes.view(E4M3)
    gemm = Gemm.of(Epilogue(DType.F32), torch.zeros(128, 128, dtype=torch.int8), codes.view(torch.int8))
    assert_same(run(gemm, a, b, tile), b.float().t())


@pytest.mark.parametrize("tile", [*WGMMA_TILES, SMALL], ids=lambda tile: tile.name)
@pytest.mark.parametrize("k", [128, 1040, 8192])
def test_sums_keep_the_tensor_cores_bound(tile: TileConfig, k: int) -> None:
    a, b = floats(129, k, 1), floats(144, k, 2)
    gemm = Gemm.of(Epilogue(DType.F32), torch.zeros(129, k, dtype=torch.int8), b.view(torch.int8))
    got = run(gemm, a, b, tile).double()
    exact, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    steps = -(-k // 32) if tile.fast else 4 if tile.schedule == "multistage" else RUN // 32
    assert bool(((got - exact).abs() <= (steps * 33 * 2.0**-13 + k * 2.0**-30) * size).all())
    # A bfloat16 is rounded by up to 2**-9.
    assert tile.fast or (got - exact).norm() < 2.0**-9 * exact.norm()


@pytest.mark.parametrize("tile", [MENU[-1], SMALL], ids=lambda tile: tile.name)
def test_a_row_does_not_depend_on_the_others(tile: TileConfig) -> None:
    a, b = floats(300, 528, 3), floats(144, 528, 4)
    a.view(torch.uint8)[7, 100] = 127  # NaN
    gemm = Gemm.of(Epilogue(DType.F32), torch.zeros(300, 528, dtype=torch.int8), b.view(torch.int8))
    whole = run(gemm, a, b, tile)
    assert whole.isnan().all(1).nonzero().flatten().tolist() == [7]
    for row in (0, 6, 255, 299):
        one = replace(gemm, a=gemm.a[row : row + 1])
        assert_same(run(one, a[row : row + 1], b, tile)[0], whole[row])
