"""The dp4a GEMM, launched directly: sampled tiles, layouts, epilogues, edges, strides, extremes; guards around D."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from qcut import jit
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_DP4A
from qcut.emitters.gemm.dp4a import Dp4aTile
from qcut.emitters.gemm.problem import K_MAX, GemmProblem, Layout
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import Gemm, pattern
from tests.gpu.support.problems import DYNAMIC, GEMM_EPILOGUES, STATIC

SMALL = Dp4aTile(16, 64, 64, 16, 32, 1, 4, 4)
LARGE = Dp4aTile(128, 128, 32, 64, 32, 1, 8, 8)
SHALLOW = Dp4aTile(64, 128, 8, 32, 64, 2, 4, 8)
LAYOUTS: tuple[tuple[Layout, Layout, Layout], ...] = tuple(product(("row", "column"), repeat=3))
TNT, NTN = LAYOUTS[2], LAYOUTS[5]
"""The default, and its opposite: nothing contiguous along K, D column-major."""
S32, WRAP = Epilogue(DType.S32), Epilogue(DType.S8, wrap=True)
REQUANTIZE = Epilogue(DType.S8, "per_token", "per_channel", "per_token", bias=True)
RESIDUAL = Epilogue(DType.F32, "per_token", "per_channel", "per_token", bias=True, residual=True)
PER_TENSOR = Epilogue(DType.F32, zero_point="per_tensor", col_scale="per_tensor")
ALIGNED = ((16, 16, 16), (112, 144, 80), (144, 112, 272), (272, 304, 1040))
"""(M, N, K): below, at and above tiles, fewer tiles of K than buffers and more."""
ODD = ((1, 1, 1), (1, 67, 131), (63, 65, 127), (15, 17, 31), (127, 129, 257), (129, 131, 509), (257, 33, 67))
"""One, primes, tile - 1 and tile + 1."""

Case = tuple[GemmProblem, Dp4aTile]


def problem(epilogue: Epilogue, layouts: tuple[Layout, Layout, Layout] = TNT, align: int = 16) -> GemmProblem:
    a, b, d = layouts
    return GemmProblem(epilogue=epilogue, layout_a=a, layout_b=b, layout_d=d, alignment_k=align, alignment_n=align)


@cache
def sampled_tiles() -> tuple[Dp4aTile, ...]:
    """24 of the tiles that are legal everywhere, and the menu."""
    legal = list(INT8_DP4A.search_space(GemmProblem(), "sm_86"))
    return (*random.Random(0).sample(legal, 24), *INT8_DP4A.default_tiles(GemmProblem(), "sm_86"))


def tile_cases() -> Iterator[Case]:
    for tile in sampled_tiles():
        yield problem(DYNAMIC), tile
        yield problem(REQUANTIZE, NTN, 1), tile


def layout_cases(align: int) -> Iterator[Case]:
    for layouts in LAYOUTS:
        yield problem(DYNAMIC, layouts, align), LARGE
        yield problem(RESIDUAL, layouts, align), SMALL
        yield problem(REQUANTIZE, layouts, align), SHALLOW


def partly_aligned_cases() -> Iterator[Case]:
    for align, layouts in product((2, 4, 8), (TNT, NTN)):
        yield problem(REQUANTIZE, layouts, align), LARGE
        yield problem(RESIDUAL, layouts, align), SHALLOW


def epilogue_cases() -> Iterator[Case]:
    for epilogue, layouts in product(GEMM_EPILOGUES, (TNT, NTN)):
        yield problem(epilogue, layouts), LARGE
        yield problem(epilogue, layouts, 1), SMALL


def raw_cases() -> Iterator[Case]:
    for epilogue, layouts in product((S32, WRAP), (TNT, NTN)):
        yield problem(epilogue, layouts), LARGE
        yield problem(epilogue, layouts, 1), SMALL


def per_tensor_cases() -> Iterator[Case]:
    for epilogue, layouts in product((STATIC, PER_TENSOR), (TNT, NTN)):
        yield problem(epilogue, layouts), LARGE


def source(case: Case) -> KernelSource:
    return INT8_DP4A.emit(*case, arch())


def name(case: Case) -> str:
    """Test id."""
    return f"{case[0].layouts}-{case[0].name}-{case[1].name}"


def check(case: Case, gemm: Gemm, extra: int = 0, offset: int = 0, pdl: bool = False) -> None:
    """Run a kernel twice on operands in its layouts and hold the result to the oracle."""
    ctas = INT8_DP4A.grid(case[1], gemm.b.shape[0])(gemm.a.shape[0])
    gemm.check(launch_gemm(gemm, case[0], source(case), ctas, extra=extra, offset=offset, pdl=pdl))


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    groups = (tile_cases(), *map(layout_cases, (16, 1)), partly_aligned_cases(), epilogue_cases(), raw_cases())
    built = jit.build_many([source(case) for group in (*groups, per_tensor_cases()) for case in group], progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


@pytest.mark.parametrize("case", list(tile_cases()), ids=name)
def test_tiles(case: Case) -> None:
    """One element; one less and one more (of what is aligned) than a tile in every direction; many tiles of K."""
    p, tile = case
    (bm, bn, bk), step = tile.threadblock_shape, p.alignment_k
    for m, n, k in ((1, step, step), (bm - 1, bn - step, bk + step), (bm + 1, bn + step, 5 * bk - 1)):
        check(case, Gemm.random(p.epilogue, m, n, -(-k // step) * step, seed=m), extra=step)


@pytest.mark.parametrize("case", list(layout_cases(16)), ids=name)
def test_aligned_layouts(case: Case) -> None:
    for m, n, k in ALIGNED:
        check(case, Gemm.random(case[0].epilogue, m, n, k, seed=m), extra=16)


@pytest.mark.parametrize("case", list(layout_cases(1)), ids=name)
def test_unaligned_layouts(case: Case) -> None:
    for i, (m, n, k) in enumerate(ODD):
        check(case, Gemm.random(case[0].epilogue, m, n, k, seed=m), extra=i % 3, offset=i)


@pytest.mark.parametrize("case", list(partly_aligned_cases()), ids=name)
def test_partly_aligned_layouts(case: Case) -> None:
    align = case[0].alignment_k
    for m, n, k in ((align, align, align), (64 + align, 128 - align, 256 - align), (32 - align, 96 + align, 3 * align)):
        check(case, Gemm.random(case[0].epilogue, m, n, k, seed=m), extra=align, offset=align)


@pytest.mark.parametrize("case", list(epilogue_cases()), ids=name)
def test_epilogues(case: Case) -> None:
    for m, n, k in ((16, 208, 272), (144, 112, 144)) if case[0].alignment_k == 16 else ((1, 1, 1), (129, 67, 131)):
        check(case, Gemm.random(case[0].epilogue, m, n, k, seed=m), extra=16)


@pytest.mark.parametrize("case", list(per_tensor_cases()), ids=name)
def test_per_tensor_arguments(case: Case) -> None:
    for zero_point in (-128, 0, 127):
        gemm = Gemm.random(case[0].epilogue, 48, 144, 1040)
        gemm.args["zero_point"] = zero_point
        if case[0].epilogue.col_scale == "per_tensor":
            gemm.args["col_scale"] = 0.0123
        check(case, gemm)


@pytest.mark.parametrize("case", list(raw_cases()), ids=name)
@pytest.mark.parametrize("kind", ["random", "all_min", "checkerboard", "identity", "zeros", "min_times_max"])
def test_raw_outputs(kind: str, case: Case) -> None:
    epilogue = case[0].epilogue
    for m, n, k in ((16, 16, 16), (144, 80, 1040)) if case[0].alignment_k == 16 else ODD[:4]:
        check(case, Gemm.random(epilogue, m, n, k) if kind == "random" else Gemm.of(epilogue, *pattern(kind, m, n, k)))


@pytest.mark.parametrize("case", [case for case in raw_cases() if case[0].epilogue == S32], ids=name)
@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "min_times_max"])
def test_sums_as_large_as_int32_holds(kind: str, case: Case) -> None:
    k = K_MAX // 16 * 16 if case[0].alignment_k == 16 else K_MAX
    check(case, Gemm.of(S32, *pattern(kind, 16, 48, k)))


def test_programmatic_dependent_launch() -> None:
    check((problem(DYNAMIC), LARGE), Gemm.random(DYNAMIC, 17, 272, 1040), pdl=True)


def test_bad_tokens_stay_in_their_rows() -> None:
    for layouts in (TNT, NTN):
        gemm = Gemm.random(DYNAMIC, 48, 128, 256)
        gemm.args["row_scale"][5] = float("nan")
        asked = problem(DYNAMIC, layouts)
        got = launch_gemm(gemm, asked, source((asked, LARGE)), INT8_DP4A.grid(LARGE, 128)(48))
        gemm.check(got)
        assert got.isnan().any(1).nonzero().flatten().tolist() == [5]
