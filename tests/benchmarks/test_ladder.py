"""The ladder without a GPU: its short kernels as binaries, its steps, ncu's CSV, rows and pages."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_ladder, harness
from benchmarks.harness import CheckError, Timing, Variant
from benchmarks.ladder import counters, report
from benchmarks.ladder.counters import COUNTERS
from benchmarks.ladder.kernels import PEAKS, REGISTERS, TILES, WMMA, emit_ladder_gemm, emit_peak, grid
from benchmarks.ladder.steps import LIBRARY, NAMES, PROBLEM, STEPS, Step, is_cutlass
from benchmarks.ladder.variants import PEAK_WORDS, Measured, fastest
from qcut import jit
from qcut.dispatch.gpus import target_named
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from tests.support.sass import instructions

H200, A100 = target_named("NVIDIA H200"), target_named("NVIDIA A100-SXM4-80GB")
PAGE = harness.ROOT / "docs" / "kernel-notes" / "ladder.md"


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


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
def test_each_step_uses_what_it_teaches_and_nothing_later(arch: str):
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


def test_text_repeats_and_names_are_distinct():
    first, second = ladder_sources("sm_90a"), ladder_sources("sm_90a")
    assert first == second
    assert len({source.name for source in first}) == len({source.text for source in first}) == len(first)
    assert all(re.fullmatch(r"qcut_\w+", source.name) for source in first)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("operands", replace(PROBLEM, a=DType.F16)),
        ("layouts", replace(PROBLEM, layout_b="row")),
        ("alignments", replace(PROBLEM, alignment_n=4)),
        ("alignments", replace(PROBLEM, alignment_k=8)),
        ("residual", GemmProblem(epilogue=Epilogue(residual=True))),
    ],
)
def test_constraints_are_refused_by_name(name: str, problem: GemmProblem):
    with pytest.raises(EmitError, match=f": {name}: "):
        emit_ladder_gemm(problem, WMMA, "sm_80")


def test_grid_takes_whole_tiles_alone():
    assert grid(REGISTERS, 256, 384, 64) == (3, 2, 1)
    for sizes in ((255, 384, 64), (256, 100, 64), (256, 384, 33), (0, 384, 64)):
        with pytest.raises(EmitError, match="whole tiles alone, not M, N, K = {}, {}, {}".format(*sizes)):
            grid(REGISTERS, *sizes)


def test_peak_loops_hold_the_products_they_count():
    assert {unit: (peak.macs, peak.sums) for unit, peak in PEAKS.items()} == {
        "dp4a": (1024 * 16 * 4, 16),
        "mma": (16 * 8 * 16 * 8 * 32, 32),
    }
    x, y = (torch.tensor([word], dtype=torch.int32).view(torch.int8).long() for word in PEAK_WORDS)
    assert int((x * y).sum()) != 0, "a sum that does not move shows nothing"


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def test_order_of_the_steps():
    assert (
        *("naive", "shared", "registers", "dp4a", "wmma_single", "wmma_double", "wmma_blocked", "mma_sync"),
        *("cutlass_sm80", "cutlass_sm90", "cublaslt"),
    ) == NAMES
    assert len({step.title for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
def test_every_step_has_kernels_and_no_two_steps_share_one(gpu):
    names = {step.name: [c.source.name for c in step.candidates(4096, 4096, 4096, gpu)] for step in STEPS}
    assert all(names[step] for step in names if step != "cutlass_sm90")
    assert bool(names["cutlass_sm90"]) is (gpu.arch == "sm_90a")
    assert max(Counter(name for group in names.values() for name in group).values()) == 1


def test_the_second_buffer_is_all_that_differs_from_the_first():
    single, double = (next(step_named(n).candidates(4096, 4096, 4096, H200)) for n in ("wmma_single", "wmma_double"))
    assert "_128x128x64_wmma" in single.source.name
    assert "_128x128x64_w64x64_s2_" in double.source.name
    assert double.source.name.endswith("_linear")
    assert single.source.block == double.source.block


def step_named(name: str) -> Step:
    return next(step for step in STEPS if step.name == name)


def test_only_cutlass_takes_a_host_compiler():
    for step in STEPS:
        tools = {candidate.source.toolchain for candidate in step.candidates(4096, 4096, 4096, H200)}
        assert tools == ({"nvcc"} if is_cutlass(step) else {"nvrtc"})


# ── rows and pages ───────────────────────────────────────────────────────────────────────────────


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
    bench_ladder.add_rows(found, (4096, 4096, 4096), steps, timings)
    return found


def test_rows(results: harness.Results):
    _, single, mma, library = results.rows
    assert single["tops"] == 343.6
    assert "x_previous" not in single
    assert (mma["x_previous"], mma["x_cublaslt"], library["x_cublaslt"]) == (2.5, 0.625, 1.0)
    assert mma["unit_peak_pct"] == pytest.approx(85.9, abs=0.05)
    assert mma["tensor_peak_pct"] == pytest.approx(100 * 858.99 / 1979, abs=0.01)
    assert "unit_peak_pct" not in library


def test_counters_go_to_the_rows_of_their_kernels(results: harness.Results, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    def profile(program: list[str]) -> dict[str, dict[str, float]]:
        asked.append(program)
        return {
            "qcut_b": {"smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum": 0.0},
            "void library": {"launch__registers_per_thread": 168.0},
        }

    monkeypatch.setattr(counters, "profile", profile)
    bench_ladder.add_counters(results, 2048)
    assert asked[0][-4:] == ["--size", "2048", "--profile", "qcut_a,qcut_b,cublaslt:3"]
    peak, single, mma, library = results.rows
    assert (mma["conflicts_ldsm"], library["ncu_registers"]) == (0.0, 168.0)
    assert not {"conflicts_ldsm", "ncu_registers"} & single.keys()
    assert "counters_at" not in peak


def test_without_ncu_a_line_says_so(results: harness.Results, monkeypatch: pytest.MonkeyPatch, capsys):
    before = [dict(row) for row in results.rows]
    monkeypatch.setenv("PATH", "")
    bench_ladder.add_counters(results, 2048)
    assert results.rows == before
    assert capsys.readouterr().out == "no counters: ncu is not on PATH\n"


def test_pages(results: harness.Results, tmp_path: Path):
    results.rows[2] |= {"conflicts_ld": 0.0, "conflicts_ldsm": 0.0, "store_sector_pct": 100.0, "shared_wavefronts": 1e6}
    text = report.text_table(results)
    assert all(str(row["step"]) in text for row in results.rows)
    said = report.summary(results)
    assert "mma_sync: 859.0 TOPS (to reach 800): reached" in said
    assert "mma_sync: 0 bank conflicts of fragment loads (to reach 0): reached" in said
    page = report.write_markdown(tmp_path / "bench_ladder.md", results).read_text()
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert len(tables) == 2 + 4 + 2 + 1
    assert len({row.count("|") for row in tables[:6]}) == 1
    assert "1,000,000" in page
    report.plot(tmp_path / "bench_ladder", results)
    plotted = {".svg", ".png"} if importlib.util.find_spec("matplotlib") else set()
    assert {path.suffix for path in tmp_path.iterdir()} == {".md"} | plotted


class StillClock:
    """Every call takes as many microseconds as it says."""

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        return body

    def time_us(self, replay: Callable[[], object]) -> float:
        self.spent = 0.0
        replay()
        return self.spent

    def variant(self, name: str, cost: float, wrong: bool = False) -> Variant:
        def call(i: int) -> None:
            self.spent = getattr(self, "spent", 0.0) + cost

        def check() -> None:
            if wrong:
                raise CheckError("3 of 9 elements differ")

        return Variant(name, call, 4, check)


def test_the_fastest_right_kernel_is_the_step():
    clock, said = StillClock(), []
    offered = [clock.variant("a", 30.0), clock.variant("b", 1.0, wrong=True), clock.variant("c", 20.0)]
    best, wrong = fastest(offered, clock, said.append)
    assert best is offered[2]
    assert (best.copies, wrong, said) == (4, ["b"], ["WRONG b: 3 of 9 elements differ"])
    slow, _ = fastest([clock.variant("d", 9000.0)], clock, said.append)
    assert slow is not None
    assert slow.copies == 1
    assert fastest([offered[1]], clock, said.append) == (None, ["b"])


@pytest.mark.parametrize("broken", [False, True])
def test_run_from_end_to_end_without_a_gpu(broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    clock = StillClock()
    ours = [measured("naive", "qcut_a"), measured("dp4a", "qcut_b", "dp4a")]
    for step, cost in zip(ours, (900.0, 300.0), strict=True):
        step.variant = clock.variant(step.kernel, cost)
    library = measured(LIBRARY, "cublaslt:3 x")
    library.variant = clock.variant(LIBRARY, 100.0, wrong=broken)

    class Run:
        def __init__(self, unit: str) -> None:
            self.unit, self.name, self.ops, self.macs_per_cycle = unit, f"qcut_peak_{unit}", 2e9, 256.0
            self.variant, self.occupied = clock.variant(f"{unit}_peak", 10.0), {"threads": 1024}

    sizes = SimpleNamespace(sizes=(512, 512, 512))
    monkeypatch.setattr(harness, "CudaClock", lambda: clock)
    monkeypatch.setattr(bench_ladder, "Operands", SimpleNamespace(random=lambda m, n, k: sizes))
    monkeypatch.setattr(bench_ladder, "our_steps", lambda chosen, data, clock: (ours, []))
    monkeypatch.setattr(bench_ladder, "library_step", lambda data, clock: library)
    monkeypatch.setattr(bench_ladder, "PeakRun", Run)
    monkeypatch.setattr(harness, "require_gpu", lambda: None)
    monkeypatch.setenv("PATH", "")
    assert bench_ladder.main(["--ncu", "--quick", "--out", str(tmp_path)]) == int(broken)
    with (tmp_path / "bench_ladder.csv").open() as file:
        rows = {row["step"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["dp4a_peak", "mma_sync_peak", "naive", "dp4a", *([] if broken else [LIBRARY])]
    assert rows["dp4a"]["x_previous"] == "3.0"
    assert rows["dp4a_peak"]["macs_per_cycle_sm"] == "256.0"
    assert (tmp_path / "bench_ladder.md").exists()
    said = capsys.readouterr().out
    assert "no counters: ncu is not on PATH" in said
    assert f"{2 if broken else 3} steps measured, {int(broken)} wrong" in said


def test_the_text_explains_every_step_and_every_counter():
    page = PAGE.read_text()
    assert re.findall(r"^### `(\w+)`", page, re.MULTILINE) == list(NAMES)
    for column in counters.COLUMNS:
        assert f"`{column}`" in page, column
    assert all(f"`{counter.metrics[0].split('.')[0]}" in page for counter in COUNTERS)


@pytest.mark.parametrize("arguments", [["--steps", "wmma"], ["--steps", ""], ["--size", "4000"], ["--ncu-size", "64"]])
def test_arguments_that_make_no_sense(arguments: list[str]):
    with pytest.raises(SystemExit) as stopped:
        bench_ladder.main(arguments)
    assert stopped.value.code == 2


def test_no_gpu_no_figures(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench_ladder.main([])
    assert stopped.value.code == 2
    assert "CUDA device" in capsys.readouterr().err
