"""The ladder without a GPU: its short kernels as binaries, its steps, its rows, and ncu's CSV."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import harness
from benchmarks.harness import Timing, Variant
from benchmarks.ladder import counters
from benchmarks.ladder.counters import COUNTERS
from benchmarks.ladder.kernels import PEAKS, TILES, emit_ladder_gemm, emit_peak
from benchmarks.ladder.steps import LIBRARY, NAMES, PROBLEM, STEPS
from benchmarks.ladder.variants import Measured
from benchmarks.layers import ladder
from qcut import jit
from qcut.dispatch.gpus import target_named
from qcut.emitters.core.source import KernelSource
from tests.support import ROOT
from tests.support.sass import instructions

H200, A100 = target_named("NVIDIA H200"), target_named("NVIDIA A100-SXM4-80GB")


def ladder_sources(arch: str) -> list[KernelSource]:
    return [emit_ladder_gemm(PROBLEM, tile, arch) for tile in TILES] + [emit_peak(unit, arch) for unit in PEAKS]


def build(sources: list[KernelSource]) -> dict[str, jit.Binary]:
    """With NVRTC, or with nvcc where NVRTC is not installed: the device text is the same."""
    if not jit.is_toolchain_available("nvrtc"):
        sources = [replace(source, toolchain="nvcc") for source in sources]
    built = jit.build_many(sources, progress=False)
    for result in built.values():
        if isinstance(result, Exception):
            raise result
    return {name: result for name, result in built.items() if isinstance(result, jit.Binary)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str):
    for binary in build(ladder_sources(arch)).values():
        resources = binary.resources
        assert resources is not None, binary.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, binary.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_each_step_uses_what_it_teaches(arch: str):
    """The compiler makes dp4a of byte products where it can: the scalar steps must not be a step ahead."""
    naive, shared, registers, wmma, dp4a, mma = (instructions(b.cubin) for b in build(ladder_sources(arch)).values())

    def has(found: set[str], *prefixes: str) -> list[bool]:
        return [any(name.startswith(prefix) for name in found) for prefix in prefixes]

    assert has(naive, "LDG.E.S8", "IMAD", "LDS", "IDP", "IMMA") == [True, True, False, False, False]
    assert has(shared, "LDG.E.U8", "LDS.S8", "BAR", "IDP", "IMMA") == [True, True, True, False, False]
    assert has(registers, "LDG.E.128", "LDS.64", "IDP", "IMMA") == [True, True, False, False]
    assert has(wmma, "LDG.E.128", "LDSM", "IMMA", "LDGSTS") == [True, True, True, False]
    assert has(dp4a, "IDP.4A.S8.S8", "LDG", "LDS") == [True, False, False]
    assert has(mma, "IMMA.16832.S8.S8", "LDG", "LDS") == [True, False, False]


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
def test_every_step_has_kernels_of_its_own(gpu):
    names = {step.name: [c.source.name for c in step.candidates(4096, 4096, 4096, gpu)] for step in STEPS}
    assert all(names[step] for step in names if step != "cutlass_sm90")
    assert bool(names["cutlass_sm90"]) is (gpu.arch == "sm_90a")
    assert max(Counter(name for group in names.values() for name in group).values()) == 1


def measured(name: str, kernel: str, unit: str | None = None) -> Measured:
    occupied = {"threads": 128, "registers": 200, "spill_bytes": 0, "smem_bytes": 65536, "ctas_per_sm": 2}
    return Measured(name, name, kernel, Variant(kernel.split(":")[0], lambda i: None), unit, occupied)  # type: ignore[arg-type]


@pytest.fixture
def results() -> harness.Results:
    """Two steps and the library on an H200, and the peak of mma.sync."""
    found = harness.Results("bench_ladder", harness.Environment("NVIDIA H200", "580", "13.0", "2.13", "abc"))
    found.add(Timing.of([100.0]), step="mma_sync_peak", tops=1000.0, unit="mma", kernel="qcut_peak")
    steps = [
        measured("wmma_single", "qcut_a", "mma"),
        measured("mma_sync", "qcut_b", "mma"),
        measured(LIBRARY, "cublaslt:3 x"),
    ]
    timings = {"qcut_a": Timing.of([400.0]), "qcut_b": Timing.of([160.0]), LIBRARY: Timing.of([100.0])}
    ladder.add_rows(found, (4096, 4096, 4096), steps, timings)
    return found


def test_rows(results: harness.Results):
    _, single, mma, library = results.rows
    assert single["tops"] == 343.6
    assert "x_previous" not in single
    assert (mma["x_previous"], mma["x_cublaslt"], library["x_cublaslt"]) == (2.5, 0.625, 1.0)
    assert mma["unit_peak_pct"] == pytest.approx(85.9, abs=0.05)
    assert mma["tensor_peak_pct"] == pytest.approx(100 * 858.99 / 1979, abs=0.01)
    assert "unit_peak_pct" not in library


def test_the_text_explains_steps_and_counters():
    page = (ROOT / "docs" / "kernel-notes" / "ladder.md").read_text()
    assert re.findall(r"^### `(\w+)`", page, re.MULTILINE) == list(NAMES)
    for column in counters.COLUMNS:
        assert f"`{column}`" in page, column
    assert all(f"`{counter.metrics[0].split('.')[0]}" in page for counter in COUNTERS)


HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(launch: int, kernel: str, metric: str, value: str) -> str:
    where = f'"{launch}","77","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(32, 32, 1)","0","9.0"'
    return f'{where},"Command line profiler metrics","{metric}","","{value}"'


SAMPLE = "\n".join(
    (
        "==PROF== Connected to process 77 (/usr/bin/python3.12)",
        '==PROF== Profiling "qcut_ladder_x": 0%....50%....100% - 9 passes',
        HEADER,
        line(0, "qcut_ladder_x", "memory_l1_wavefronts_shared", "1,572,864"),
        line(0, "qcut_ladder_x", "memory_l1_wavefronts_shared_ideal", "524,288"),
        line(0, "qcut_ladder_x", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "(!) n/a"),
        line(0, "qcut_ladder_x", "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active", "41.25"),
        line(0, "qcut_ladder_x", "launch__registers_per_thread", "96"),
        line(1, "void gemm<signed char>(Params<int, 2>)", "launch__registers_per_thread", "168"),
        line(2, "qcut_ladder_x", "launch__registers_per_thread", "1"),
        "==PROF== Disconnected from process 77",
    )
)


def test_parser_reads_the_first_launch_of_each_kernel():
    found = counters.parse(SAMPLE)
    assert list(found) == ["qcut_ladder_x", "void gemm<signed char>"]
    assert found["void gemm<signed char>"] == {"launch__registers_per_thread": 168.0}
    assert counters.columns(found["qcut_ladder_x"]) == {
        "shared_wavefronts": 1572864.0,
        "shared_wavefronts_ideal": 524288.0,
        "tensor_active_pct": 41.25,
        "ncu_registers": 96.0,
        "bank_conflicts": 1048576.0,
    }
