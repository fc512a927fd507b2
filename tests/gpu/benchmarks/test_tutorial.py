"""The tutorial on a GPU: its short kernels bitwise right, the benchmark from end to end."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.harness import CheckError
from benchmarks.layers import tutorial
from benchmarks.layers.gemm import Operands
from benchmarks.layers.tutorial import SHORT, STEPS, ShortTile, candidates, kernel_variant, short_grid, square
from qcut import jit
from qcut.backends.cuda.launch.plans import target
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import Gemm, pattern
from tests.gpu.support.problems import DYNAMIC

REQUANTIZE = Epilogue(DType.S8, col_scale="per_channel")
S32 = Epilogue(DType.S32)
EPILOGUES = (REQUANTIZE, S32, Epilogue(DType.S8, wrap=True), DYNAMIC, Epilogue(DType.F32, zero_point="per_token"))

Case = tuple[Epilogue, ShortTile]
CASES = tuple(product(EPILOGUES, SHORT))


def name(case: Case) -> str:
    """Test id."""
    return f"{case[1].step}-{case[0].name}"


def source(case: Case) -> KernelSource:
    return tutorial.short_kernel(case[1], GemmProblem(epilogue=case[0]), arch())


def check(case: Case, gemm: Gemm, extra: int = 0) -> None:
    """Run a kernel twice and hold the result to the oracle."""
    grid = short_grid(case[1], gemm.a.shape[0], gemm.b.shape[0], gemm.a.shape[1])
    gemm.check(launch_gemm(gemm, GemmProblem(epilogue=case[0]), source(case), grid, extra=extra))


def sizes(tile: ShortTile) -> Iterator[tuple[int, int, int]]:
    """One tile, and some with every side different."""
    bm, bn, bk = tile.threadblock_shape
    bk = max(bk, 16)  # rows of the operands start at multiples of 16 bytes
    yield bm, bn, bk
    yield 2 * bm, 3 * bn, 5 * bk
    yield 256, 384, 192


@pytest.mark.parametrize("case", CASES, ids=name)
def test_short_kernels(case: Case) -> None:
    for i, (m, n, k) in enumerate(sizes(case[1])):
        check(case, Gemm.random(case[0], m, n, k, seed=i), extra=16 * i)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in (REQUANTIZE, S32)], ids=name)
@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "identity", "zeros", "min_times_max"])
def test_short_kernels_on_extremes(case: Case, kind: str) -> None:
    check(case, Gemm.of(case[0], *pattern(kind, 128, 256, 4096)))


def test_wrong_result_is_noticed() -> None:
    data = Operands.random(square(128))
    (candidate,) = candidates(STEPS[0], 128, target(torch.cuda.current_device()))
    variant, _ = kernel_variant(candidate, jit.build(candidate.source), data)
    assert variant.check is not None
    variant.check()
    data.acc[5, 7] += 1 << 20
    with pytest.raises(CheckError, match="1 of 16384"):
        variant.check()


def test_benchmark_from_end_to_end(tmp_path: Path) -> None:
    """Every kernel of every step is checked bitwise by the benchmark itself; CUTLASS's take minutes to compile."""
    quick = [step for step in STEPS if not step.startswith("cutlass")]
    assert tutorial.main(["--quick", "--size", "256", "--steps", ",".join(quick), "--out", str(tmp_path)]) == 0
    with (tmp_path / "bench_tutorial.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == quick
    assert all(float(row["median_us"]) > 0 for row in rows)
    assert all(not int(row["spill_bytes"] or 0) for row in rows)
