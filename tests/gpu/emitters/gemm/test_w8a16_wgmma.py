"""The W8A16 kernel on wgmma, launched directly: tiles, edges, strides, clusters; guards around D."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import W8A16_WGMMA
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.gemm.w8a16_wgmma import W8A16WgmmaTile
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import TORCH_DTYPE, Gemm, assert_same, assert_w8a16_near, full_range

BIAS = Epilogue(col_scale="per_channel", bias=True)
EPILOGUES = (
    (Epilogue(DType.F32), 16),
    (Epilogue(DType.BF16, "per_token", "per_channel", bias=True, residual=True), 1),
    (Epilogue(DType.S8, "none", "per_channel", bias=True, activation=Activation.RELU), 16),
    (Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True), 4),
)
"""With the alignment of D's rows, in elements."""
MENU = W8A16_WGMMA.default_tiles(GemmProblem(DType.F16), "sm_90a")
PLAIN = W8A16WgmmaTile(64, 2, stages=12, prefetch=4)
SPLIT = W8A16WgmmaTile(64, 1, splits=4, stages=12, prefetch=2, ctas=2)
WIDE = W8A16WgmmaTile(128, 2, 2, stages=10, prefetch=4)
EVERY_M = (1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 192, 256, 384, 512, 1024)


UNALIGNED = GemmProblem(a=DType.F16, epilogue=BIAS, alignment_k=8, alignment_n=1)
ALIGNED = {a: GemmProblem(a=a, epilogue=BIAS, alignment_k=8) for a in (DType.F16, DType.BF16)}
EXACT = {a: GemmProblem(a=a, epilogue=Epilogue(DType.F32), alignment_k=8) for a in (DType.F16, DType.BF16)}
ROUNDED = (PLAIN, SPLIT, W8A16WgmmaTile(256, 2, 2, stages=6))


def of(epilogue: Epilogue, alignment: int) -> GemmProblem:
    return GemmProblem(a=DType.F16, epilogue=epilogue, alignment_k=8, alignment_n=alignment)


def cases() -> Iterator[KernelSource]:
    kernels = [(UNALIGNED, tile) for tile in MENU]
    kernels += [(of(*epilogue), tile) for epilogue in EPILOGUES for tile in (PLAIN, SPLIT)]
    kernels += [(problem, PLAIN) for problem in EXACT.values()]
    kernels += [(problem, tile) for problem in ALIGNED.values() for tile in (*ROUNDED, WIDE)]
    yield from (W8A16_WGMMA.emit(problem, tile, arch()) for problem, tile in kernels)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    if arch() != "sm_90a" or not jit.is_toolchain_available("nvcc"):
        pytest.skip("needs wgmma, nvcc and g++")
    errors = [r for r in jit.build_many(cases(), progress=False).values() if isinstance(r, Exception)]
    assert not errors, errors[0]


def run(
    gemm: Gemm, problem: GemmProblem, tile: W8A16WgmmaTile, x: Tensor, *, extra: int = 0, pdl: bool = False
) -> Tensor:
    source = W8A16_WGMMA.emit(problem, tile, arch())
    return launch_gemm(gemm, problem, source, (1, 1, 1), x=x, extra=extra, pdl=pdl)  # the launcher knows the grid


def small_integers(m: int, n: int, k: int, epilogue: Epilogue) -> Gemm:
    """A GEMM with every partial sum an integer below 2**24: float32 accumulation is exact in any order."""
    assert 8 * 128 * k < 2**24
    a = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(m)).to(torch.int8)
    return Gemm.of(epilogue, a, full_range(n, k, seed=n))


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("tile", MENU, ids=lambda t: t.name)
def test_tiles(tile: W8A16WgmmaTile, pdl: bool) -> None:
    """Fewer columns than a cluster divides, ragged columns and rows, one tile and several, one token and full tiles."""
    for n, k in ((16, 16), (33, 264), (301, 1048), (130, 8208)):
        for m in (1, tile.tokens - 9, tile.tokens, tile.tokens + 1):
            gemm = small_integers(m, n, k, BIAS)
            gemm.check(run(gemm, UNALIGNED, tile, gemm.a.half(), extra=8, pdl=pdl))


@pytest.mark.parametrize("tile", [PLAIN, SPLIT, WIDE], ids=lambda t: t.name)
def test_every_number_of_tokens(tile: W8A16WgmmaTile) -> None:
    for m in EVERY_M:
        gemm = small_integers(m, 77, 648, BIAS)
        gemm.check(run(gemm, UNALIGNED, tile, gemm.a.half()))


@pytest.mark.parametrize("tile", [PLAIN, SPLIT], ids=lambda t: t.name)
@pytest.mark.parametrize(("epilogue", "alignment"), EPILOGUES, ids=lambda e: getattr(e, "name", str(e)))
def test_epilogues(epilogue: Epilogue, alignment: int, tile: W8A16WgmmaTile) -> None:
    for m, n in ((5, 336), (70, 64 + alignment), (64, 47 * alignment)):
        gemm = small_integers(m, n, 400, epilogue)
        gemm.check(run(gemm, of(epilogue, alignment), tile, gemm.a.half(), extra=16))


@pytest.mark.parametrize("a", EXACT, ids=lambda a: a.value)
def test_every_weight_converts_exactly(a: DType) -> None:
    """x is the identity, so D is the weights: all 256 values, in every column of K."""
    weights = (torch.arange(256)[:, None] + torch.arange(128)).to(torch.uint8).view(torch.int8)
    x = torch.eye(128, dtype=torch.int8)
    gemm = Gemm.of(EXACT[a].epilogue, x, weights)
    assert_same(run(gemm, EXACT[a], PLAIN, x.to(TORCH_DTYPE[a])), weights.t().float())


@pytest.mark.parametrize("a", ALIGNED, ids=lambda a: a.value)
@pytest.mark.parametrize("tile", ROUNDED, ids=lambda t: t.name)
def test_rounding(tile: W8A16WgmmaTile, a: DType) -> None:
    """Real tokens against float64.

    The tensor core and the sums over CTAs round or truncate each addition to 24 bits: K * 2**-23 * sum |x q| bounds the
    sum's error. Scale and bias round once each, to within 2**-24 of their result, and D once.
    """
    m, n, k = 77, 144, 4112
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(TORCH_DTYPE[a])
    gemm = Gemm.of(BIAS, torch.zeros(m, k, dtype=torch.int8), full_range(n, k))
    got = run(gemm, ALIGNED[a], tile, x)
    assert_w8a16_near(got, x, gemm)


@pytest.mark.parametrize("tile", [PLAIN, SPLIT, WIDE], ids=lambda t: t.name)
def test_a_row_does_not_depend_on_the_others(tile: W8A16WgmmaTile) -> None:
    x = torch.randn(70, 1040, generator=torch.Generator().manual_seed(2)).half()
    x[7, 100] = float("nan")
    gemm = Gemm.of(BIAS, torch.zeros(70, 1040, dtype=torch.int8), full_range(144, 1040))
    whole = run(gemm, ALIGNED[DType.F16], tile, x)
    assert whole.isnan().all(1).nonzero().flatten().tolist() == [7]
    assert not whole[torch.arange(70) != 7].isnan().any()
    for row in (0, 5, 69):
        assert_same(run(gemm, ALIGNED[DType.F16], tile, x[row : row + 1])[0], whole[row])
