"""The ladder on a GPU: its short kernels bitwise right, its peaks plausible, the benchmark from end to end."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.ladder.kernels import PEAKS, TILES, LadderTile, Unit, emit_ladder_gemm, grid
from benchmarks.ladder.steps import LIBRARY, NAMES, STEPS, is_cutlass
from benchmarks.ladder.variants import Operands, PeakRun, kernel_variant, library_step
from benchmarks.layers import ladder
from qcut import jit
from qcut.backends.cuda.launch.plans import target
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.tuning.timing import CudaClock
from tests.gpu.support.launching import arch, launch_gemm
from tests.gpu.support.oracles import Gemm, pattern
from tests.gpu.support.problems import DYNAMIC

REQUANTIZE = Epilogue(DType.S8, col_scale="per_channel")
S32 = Epilogue(DType.S32)
EPILOGUES = (REQUANTIZE, S32, Epilogue(DType.S8, wrap=True), DYNAMIC, Epilogue(DType.F32, zero_point="per_token"))
QUICK = [name for name in NAMES if not name.startswith("cutlass")]

Case = tuple[Epilogue, LadderTile]
CASES = tuple(product(EPILOGUES, TILES))


def name(case: Case) -> str:
    """Test id."""
    return f"{case[1].step}-{case[0].name}"


def source(case: Case) -> KernelSource:
    return emit_ladder_gemm(GemmProblem(epilogue=case[0]), case[1], arch())


def check(case: Case, gemm: Gemm, extra: int = 0) -> None:
    """Run a kernel twice and hold the result to the oracle."""
    ctas = grid(case[1], gemm.a.shape[0], gemm.b.shape[0], gemm.a.shape[1])
    gemm.check(launch_gemm(gemm, GemmProblem(epilogue=case[0]), source(case), ctas, extra=extra))


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    gpu = target(torch.cuda.current_device())
    steps = [c.source for s in STEPS if not is_cutlass(s) for c in s.candidates(256, 256, 256, gpu)]
    built = jit.build_many([*map(source, CASES), *steps], progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


def sizes(tile: LadderTile) -> Iterator[tuple[int, int, int]]:
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


def test_every_kernel_of_every_step_is_checked_bitwise() -> None:
    gpu = target(torch.cuda.current_device())
    data = Operands.random(256, 256, 256, copies=2)
    for step in STEPS:
        for candidate in () if is_cutlass(step) else step.candidates(*data.sizes, gpu):
            variant, occupied = kernel_variant(candidate, jit.build(candidate.source), data)
            assert variant.check is not None
            variant.check()
            variant.call(1)
            data.check()
            assert occupied["ctas_per_sm"], candidate.source.name
            assert not occupied["spill_bytes"], candidate.source.name
    variant = library_step(data, CudaClock()).variant
    assert variant.check is not None
    variant.check()


def test_a_wrong_result_is_noticed() -> None:
    data = Operands.random(128, 128, 128, copies=1)
    gpu = target(torch.cuda.current_device())
    candidate = next(STEPS[0].candidates(*data.sizes, gpu))
    variant, _ = kernel_variant(candidate, jit.build(candidate.source), data)
    data.acc[5, 7] += 1 << 20
    assert variant.check is not None
    with pytest.raises(ladder.harness.CheckError, match="1 of 16384"):
        variant.check()


@pytest.mark.parametrize("unit", PEAKS)
def test_peaks(unit: Unit) -> None:
    """Every product is made, in about the time that the programming guide gives for dp4a.

    Cycles go on while another process has its turn on the GPU: the fastest of the launches had none.
    """
    run = PeakRun(unit)
    run.check()
    rates = []
    for i in range(20):
        run.call(i)
        rates.append(run.macs_per_cycle)
    rate = max(rates)
    if unit == "dp4a":
        assert 0.85 * 256 < rate < 1.02 * 256
    else:
        assert rate > 512
    assert not run.occupied["spill_bytes"]


def test_benchmark_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["--quick", "--size", "256", "--steps", ",".join(QUICK), "--out", str(tmp_path)]
    assert ladder.main(arguments) == 0
    with (tmp_path / "bench_ladder.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["dp4a_peak", "mma_sync_peak", *QUICK]
    assert all(float(row["median_us"]) > 0 for row in rows)
    kernels = [row["kernel"].split()[0] for row in rows if row["step"] in (*QUICK, LIBRARY)]
    assert ladder.main(["--size", "256", "--profile", ",".join(kernels)]) == 0
