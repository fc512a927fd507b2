"""The raw tensor-core GEMMs in every layout, with raw outputs and with K split over a cluster; guards around D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from qcut import jit
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_MMA
from qcut.emitters.gemm.problem import GemmProblem, Layout, TileConfig
from qcut.emitters.gemm.wmma import Int8Wmma, SharedLayout
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import Gemm, pattern
from tests.gpu.support.problems import DYNAMIC, GEMM_EPILOGUES

SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
MIDDLE = TileConfig((64, 64, 64), (32, 32, 64), 3)
LARGE = TileConfig((128, 128, 64), (64, 64, 64), 3)
LAYOUTS: tuple[tuple[Layout, Layout, Layout], ...] = tuple(product(("row", "column"), repeat=3))
FAR: tuple[Layout, Layout, Layout] = ("column", "row", "column")
"""The layouts farthest from the default: nothing contiguous along K, D column-major."""
RESIDUAL = Epilogue(DType.F32, "per_token", "per_channel", "per_token", bias=True, residual=True)
REQUANTIZE = Epilogue(DType.S8, "per_token", "per_channel", bias=True, activation=Activation.RELU)
RAW = (Epilogue(DType.S32), Epilogue(DType.S8, wrap=True))
ALIGNED = ((16, 16, 16), (112, 128, 144), (128, 144, 272), (144, 80, 1040), (272, 304, 400))
"""(M, N, K): below, at and above tiles, fewer tiles of K than stages and more."""
ODD = ((1, 1, 1), (1, 67, 131), (63, 65, 127), (15, 17, 31), (65, 127, 257), (129, 131, 509), (257, 33, 67))
"""One, primes, tile - 1 and tile + 1."""


@dataclass(frozen=True)
class Case:
    """One kernel."""

    problem: GemmProblem
    tile: TileConfig
    family: str = "mma"
    shared: SharedLayout = "blocked"

    @property
    def name(self) -> str:
        """Test id."""
        parts = (self.family, self.shared, self.problem.layouts, self.problem.name, self.tile.name)
        return "-".join(part for part in parts if part != "blocked")

    @property
    def is_buildable(self) -> bool:
        """Whether the GPU at hand has what it takes: clusters, for a split K."""
        return self.tile.splits == 1 or architecture(arch()).clusters

    def source(self) -> KernelSource:
        """Its text."""
        if self.family == "wmma":
            return Int8Wmma(self.shared).emit(self.problem, self.tile, arch())
        return INT8_MMA.emit(self.problem, self.tile, arch())

    def check(self, gemm: Gemm, extra: int = 0, offset: int = 0, pdl: bool = False) -> None:
        """Run it twice on operands in its layouts and hold the result to the oracle."""
        ctas = INT8_MMA.grid(self.tile, gemm.b.shape[0])(gemm.a.shape[0])
        got = launch_gemm(gemm, self.problem, self.source(), ctas, extra=extra, offset=offset, pdl=pdl)
        gemm.check(got)


def problem(epilogue: Epilogue, layouts: tuple[Layout, Layout, Layout], align: int = 16) -> GemmProblem:
    a, b, d = layouts
    return GemmProblem(epilogue=epilogue, layout_a=a, layout_b=b, layout_d=d, alignment_k=align, alignment_n=align)


def layout_cases(align: int) -> Iterator[Case]:
    for layouts in LAYOUTS:
        yield Case(problem(DYNAMIC, layouts, align), SMALL)
        yield Case(problem(REQUANTIZE, layouts, align), LARGE)
        yield Case(problem(RESIDUAL, layouts, align), MIDDLE, "wmma")


def partly_aligned_cases() -> Iterator[Case]:
    for align, layouts in product((2, 4, 8), (LAYOUTS[0], FAR)):
        yield Case(problem(REQUANTIZE, layouts, align), MIDDLE)


def epilogue_cases() -> Iterator[Case]:
    for epilogue in GEMM_EPILOGUES:
        yield Case(problem(epilogue, ("row", "column", "column")), MIDDLE)


def raw_cases() -> Iterator[Case]:
    for epilogue, layouts in product(RAW, (LAYOUTS[2], FAR)):
        yield Case(problem(epilogue, layouts), LARGE)
        yield Case(problem(epilogue, layouts, 1), SMALL)
        yield Case(problem(epilogue, layouts), MIDDLE, "wmma")


def split_cases() -> Iterator[Case]:
    for splits in (2, 4, 8):
        yield Case(problem(DYNAMIC, LAYOUTS[2]), replace(SMALL, splits=splits))
        yield Case(problem(REQUANTIZE, LAYOUTS[2]), replace(MIDDLE, splits=splits))
        yield Case(problem(RESIDUAL, FAR, 1), replace(MIDDLE, splits=splits))
    yield Case(problem(RAW[0], FAR), replace(LARGE, splits=2))
    yield Case(problem(RESIDUAL, LAYOUTS[2]), replace(MIDDLE, splits=4), "wmma")


def shared_cases() -> Iterator[Case]:
    shapes: tuple[SharedLayout, ...] = ("padded", "linear")
    for shared, layouts in product(shapes, (LAYOUTS[2], FAR)):
        yield Case(problem(REQUANTIZE, layouts), MIDDLE, "wmma", shared)
    for tile in (SMALL, LARGE):
        yield Case(problem(DYNAMIC, LAYOUTS[2]), tile, "wmma")


def all_cases() -> list[Case]:
    groups = (partly_aligned_cases, epilogue_cases, raw_cases, split_cases, shared_cases)
    cases = [*layout_cases(16), *layout_cases(1)]
    return cases + [case for group in groups for case in group()]


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    built = jit.build_many([case.source() for case in all_cases() if case.is_buildable], progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


@pytest.mark.parametrize("case", list(layout_cases(16)), ids=lambda c: c.name)
def test_aligned_layouts(case: Case) -> None:
    for m, n, k in ALIGNED:
        case.check(Gemm.random(case.problem.epilogue, m, n, k, seed=m), extra=16)


@pytest.mark.parametrize("case", list(layout_cases(1)), ids=lambda c: c.name)
def test_unaligned_layouts(case: Case) -> None:
    for i, (m, n, k) in enumerate(ODD):
        case.check(Gemm.random(case.problem.epilogue, m, n, k, seed=m), extra=i % 3, offset=i)


@pytest.mark.parametrize("case", list(partly_aligned_cases()), ids=lambda c: c.name)
def test_partly_aligned_layouts(case: Case) -> None:
    align = case.problem.alignment_k
    for m, n, k in ((align, align, align), (64 + align, 128 - align, 256 - align), (32 - align, 96 + align, 3 * align)):
        case.check(Gemm.random(case.problem.epilogue, m, n, k, seed=m), extra=align, offset=align)


@pytest.mark.parametrize("case", list(epilogue_cases()), ids=lambda c: c.name)
def test_column_major_epilogues(case: Case) -> None:
    for m in (16, 64, 144):
        case.check(Gemm.random(case.problem.epilogue, m, 208, 272, seed=m), extra=16)


@pytest.mark.parametrize("case", list(raw_cases()), ids=lambda c: c.name)
@pytest.mark.parametrize("kind", ["random", "all_min", "checkerboard", "identity", "min_times_max"])
def test_raw_outputs(kind: str, case: Case) -> None:
    epilogue = case.problem.epilogue
    for m, n, k in ((16, 16, 16), (144, 80, 1040)) if case.problem.alignment_k == 16 else ODD[:4]:
        gemm = Gemm.random(epilogue, m, n, k) if kind == "random" else Gemm.of(epilogue, *pattern(kind, m, n, k))
        case.check(gemm)


@pytest.mark.parametrize("case", list(split_cases()), ids=lambda c: c.name)
def test_k_split_over_a_cluster(case: Case) -> None:
    """K below one tile, which leaves CTAs without work; fewer tiles than CTAs; a ragged end; long."""
    if not case.is_buildable:
        pytest.skip(f"{arch()} has no thread-block clusters")
    aligned = case.problem.alignment_k == 16
    for k in (16, 192, 400, 1040, 4096) if aligned else (1, 129, 509, 1031):
        for m, n in ((1, 16), (16, 64), (144, 208)) if aligned else ((1, 1), (65, 67)):
            rows = -(-m // 16) * 16 if aligned and "column" in (case.problem.layout_a, case.problem.layout_d) else m
            case.check(Gemm.random(case.problem.epilogue, rows, n, k, seed=k))


@pytest.mark.parametrize("splits", [1, 4])
def test_programmatic_dependent_launch(splits: int) -> None:
    case = Case(problem(DYNAMIC, LAYOUTS[2]), replace(SMALL, splits=splits))
    if not case.is_buildable:
        pytest.skip(f"{arch()} has no thread-block clusters")
    case.check(Gemm.random(DYNAMIC, 17, 272, 1040), pdl=True)


@pytest.mark.parametrize("case", list(shared_cases()), ids=lambda c: c.name)
def test_wmma_shared_layouts(case: Case) -> None:
    for m, n, k in ALIGNED:
        case.check(Gemm.random(case.problem.epilogue, m, n, k, seed=n), extra=16)


@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "identity", "zeros", "min_times_max"])
def test_extremes_across_k(kind: str) -> None:
    for case in (Case(problem(DYNAMIC, FAR), SMALL), Case(problem(REQUANTIZE, FAR), LARGE)):
        for k in (1040, 65_536):
            case.check(Gemm.of(case.problem.epilogue, *pattern(kind, 16, 144, k)))
