"""The few-token W8A16 kernel, launched directly: tiles, edges, strides, clusters; guards around D."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.arch import CLUSTER_ARCHITECTURES, architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import W8A16_STREAM
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.w8a16 import W8A16Tile, smem_bytes
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import TORCH_DTYPE, Gemm, assert_same, assert_w8a16_near, full_range

BIAS = Epilogue(col_scale="per_channel", bias=True)
EPILOGUES = (
    BIAS,
    Epilogue(DType.F32),
    Epilogue(DType.BF16, "per_token", "per_channel", bias=True, residual=True),
    Epilogue(DType.S8, "none", "per_channel", bias=True, activation=Activation.RELU),
    Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True),
)
TILES = (
    W8A16Tile(7, 32),
    W8A16Tile(3, 10, 1, 3),
    W8A16Tile(2, 3, 2, 2),
    W8A16Tile(4, 16, 2, 1, 16),
    W8A16Tile(5, 4, 1, 3, 32),
    W8A16Tile(2, 2, splits=2),
    W8A16Tile(3, 3, 1, 2, 16, 4),
    W8A16Tile(1, 2, 2, 1, 32, 8),
)
SPLIT = W8A16Tile(3, 3, 1, 2, 16, 4)
MIDDLE = W8A16Tile(4, 16, 2, 1, 16)


def require(tile: W8A16Tile) -> None:
    if tile.splits > 1 and arch() not in CLUSTER_ARCHITECTURES:
        pytest.skip(f"{tile.name} needs thread-block clusters; {arch()} has none")
    if smem_bytes(GemmProblem(a=DType.F16), tile) > architecture(arch()).smem_bytes:
        pytest.skip(f"{tile.name} needs more shared memory than {arch()} has")


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    tiles = [t for t in TILES if t.splits == 1 or arch() in CLUSTER_ARCHITECTURES]
    tiles = [t for t in tiles if smem_bytes(GemmProblem(a=DType.F16), t) <= architecture(arch()).smem_bytes]
    sources = [W8A16_STREAM.emit(GemmProblem(a=DType.F16, epilogue=BIAS), tile, arch()) for tile in tiles]
    sources += [W8A16_STREAM.emit(GemmProblem(a=DType.F16, epilogue=e), MIDDLE, arch()) for e in EPILOGUES]
    errors = [r for r in jit.build_many(sources, progress=False).values() if isinstance(r, Exception)]
    assert not errors, errors[0]


def run(
    gemm: Gemm,
    problem: GemmProblem,
    tile: W8A16Tile,
    x: Tensor,
    *,
    extra: int = 0,
    offset: int = 0,
    pdl: bool = False,
) -> Tensor:
    source = W8A16_STREAM.emit(problem, tile, arch())
    ctas = W8A16_STREAM.grid(tile, len(gemm.b))(len(x))
    return launch_gemm(gemm, problem, source, ctas, x=x, extra=extra, offset=offset, pdl=pdl)


def small_integers(m: int, n: int, k: int, epilogue: Epilogue) -> Gemm:
    """A GEMM with every partial sum an integer below 2**24: float32 accumulation is exact in any order."""
    assert 8 * 128 * k < 2**24
    a = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(m)).to(torch.int8)
    return Gemm.of(epilogue, a, full_range(n, k, seed=n))


def counts(tile: W8A16Tile) -> list[int]:
    """Numbers of tokens around the tile's eights."""
    return [m for m in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32) if m <= tile.tokens]


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: t.name)
def test_tiles(tile: W8A16Tile, pdl: bool) -> None:
    """Less than a warp's columns, whole rounds, several rounds, ragged; rows inside a tile and over several."""
    require(tile)
    problem = GemmProblem(a=DType.F16, epilogue=BIAS)
    for n, k in ((16, 16), (33, 272), (304, 1040), (112, 4096), (129, 8208)):
        for m in counts(tile):
            gemm = small_integers(m, n, k, BIAS)
            gemm.check(run(gemm, replace(problem, alignment_n=1), tile, gemm.a.half(), pdl=pdl))


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_epilogues(epilogue: Epilogue) -> None:
    for m in (1, 5, 16):
        gemm = small_integers(m, 336, 400, epilogue)
        gemm.check(run(gemm, GemmProblem(a=DType.F16, epilogue=epilogue), MIDDLE, gemm.a.half(), extra=16))


@pytest.mark.parametrize("tile", [MIDDLE, SPLIT], ids=lambda t: t.name)
def test_residual_over_a_cluster(tile: W8A16Tile) -> None:
    require(tile)
    epilogue = EPILOGUES[2]
    problem = GemmProblem(a=DType.BF16, epilogue=epilogue, alignment_n=1)
    for m, n in ((1, 47), (13, 100)):
        gemm = small_integers(m, n, 1000 // 8 * 8, epilogue)
        gemm.check(run(gemm, replace(problem, alignment_k=8), tile, gemm.a.bfloat16()))


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
def test_unaligned_tokens(a: DType) -> None:
    tile = W8A16Tile(2, 4, 1, 2, 16)
    problem = GemmProblem(a=a, epilogue=BIAS, alignment_k=1, alignment_n=1)
    for m, n, k, extra, offset in ((1, 1, 1, 0, 1), (15, 33, 37, 1, 3), (9, 65, 129, 0, 0), (16, 127, 1500, 5, 7)):
        gemm = small_integers(m, n, k, BIAS)
        gemm.check(run(gemm, problem, tile, gemm.a.to(TORCH_DTYPE[a]), extra=extra, offset=offset))


def test_tokens_in_eights() -> None:
    problem = GemmProblem(a=DType.F16, epilogue=BIAS, alignment_k=8)
    for k in (8, 24, 136, 1000):
        gemm = small_integers(3, 80, k, BIAS)
        gemm.check(run(gemm, problem, MIDDLE, gemm.a.half(), extra=8))


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
def test_every_weight_converts_exactly(a: DType) -> None:
    """x is the identity, so D is the weights: all 256 values, in every column of K."""
    epilogue = Epilogue(DType.F32)
    weights = (torch.arange(256)[:, None] + torch.arange(128)).to(torch.uint8).view(torch.int8)
    problem = GemmProblem(a=a, epilogue=epilogue)
    tile = W8A16Tile(5, 4, 1, 3, 32)
    for first in range(0, 128, 32):
        x = torch.eye(128, dtype=torch.int8)[first : first + 32]
        gemm = Gemm.of(epilogue, x, weights)
        assert_same(run(gemm, problem, tile, x.to(TORCH_DTYPE[a])), weights[:, first : first + 32].t().float())


@pytest.mark.parametrize("a", [DType.F16, DType.BF16], ids=lambda a: a.value)
@pytest.mark.parametrize("tile", [MIDDLE, SPLIT], ids=lambda t: t.name)
def test_rounding(tile: W8A16Tile, a: DType) -> None:
    """Real tokens against float64."""
    require(tile)
    m, n, k = 13, 144, 4112
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(TORCH_DTYPE[a])
    gemm = Gemm.of(BIAS, torch.zeros(m, k, dtype=torch.int8), full_range(n, k))
    got = run(gemm, GemmProblem(a=a, epilogue=BIAS), tile, x)
    assert_w8a16_near(got, x, gemm)


@pytest.mark.parametrize("tile", [MIDDLE, SPLIT], ids=lambda t: t.name)
def test_a_row_does_not_depend_on_the_others(tile: W8A16Tile) -> None:
    require(tile)
    x = torch.randn(16, 1040, generator=torch.Generator().manual_seed(2)).half()
    x[7, 100] = float("nan")
    gemm = Gemm.of(BIAS, torch.zeros(16, 1040, dtype=torch.int8), full_range(144, 1040))
    problem = GemmProblem(a=DType.F16, epilogue=BIAS)
    whole = run(gemm, problem, tile, x)
    assert whole.isnan().all(1).nonzero().flatten().tolist() == [7]
    assert not whole[torch.arange(16) != 7].isnan().any()
    for row in (0, 5, 15):
        assert_same(run(gemm, problem, tile, x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("m", [1, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(1280, 1280), (768, 5120), (5003, 2064)])
def test_the_chosen_tile(n: int, k: int, m: int) -> None:
    problem = GemmProblem(a=DType.F16, epilogue=BIAS, alignment_n=1)
    tile = best_tile(
        W8A16_STREAM, problem, m, n, k, Target(arch(), torch.cuda.get_device_properties(0).multi_processor_count)
    )
    gemm = small_integers(m, n, k, BIAS)
    gemm.check(run(gemm, problem, tile, gemm.a.half(), pdl=True))
