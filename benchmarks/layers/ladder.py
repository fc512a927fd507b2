"""From a thread per element to wgmma: one int8 GEMM, step by step, each step checked, timed and explained.

``D = clamp(rne(acc * col_scale[n] * out_inv_scale) + out_zero_point)`` of square matrices, the same arithmetic in every
kernel; cuBLASLt multiplies by one number. A step with several kernels is represented by its fastest. Two further rows
measure the peak rate of products from registers alone, with dp4a and with mma.sync. ``docs/kernel-notes/ladder.md``
names the bottleneck that each step removes. ``--ncu`` adds ncu's hardware counters.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable

import torch

from benchmarks import harness
from benchmarks.harness import Timing
from benchmarks.ladder import counters, report
from benchmarks.ladder.kernels import PEAKS
from benchmarks.ladder.steps import LIBRARY, NAMES, STEPS, Candidate, Step, is_cutlass
from benchmarks.ladder.variants import Measured, Operands, PeakRun, fastest, kernel_variant, library_step
from qcut import jit
from qcut.backends.cuda.launch import plans as launch_plans
from qcut.emitters.core.source import KernelSource
from qcut.emitters.families import INT8_CUTLASS
from qcut.tuning.cublaslt import CublasLtError, Int8Matmul

# ── what runs ────────────────────────────────────────────────────────────────────────────────────


def our_steps(chosen: list[Step], data: Operands, clock: harness.Clock) -> tuple[list[Measured], list[str]]:
    """The steps that are kernels of qcut, and the names of kernels that are wrong."""
    gpu = launch_plans.target(torch.cuda.current_device())
    candidates: dict[str, list[Candidate]] = {}
    for step in chosen:
        if is_cutlass(step) and not jit.is_toolchain_available("nvcc"):
            print(f"{step.name}: not built, nvcc or g++ is missing")
            continue
        candidates[step.name] = list(step.candidates(*data.sizes, gpu))
        if not candidates[step.name]:
            print(f"{step.name}: does not exist on {gpu.arch}")
    built = build(c.source for group in candidates.values() for c in group)
    steps: list[Measured] = []
    wrong: list[str] = []
    for step in chosen:
        group = candidates.get(step.name, [])
        made = {c.source.name: kernel_variant(c, built[c.source.name], data) for c in group}
        variants = [variant for variant, _ in made.values()]
        best, failed = fastest(variants, clock, functools.partial(print, f"{step.name}:"))
        if best is not None:
            steps.append(Measured(step.name, step.title, best.name, best, step.unit, made[best.name][1]))
        wrong += failed
    return steps, wrong


def build(sources: Iterable[KernelSource]) -> dict[str, jit.Binary]:
    """Build in parallel. Raises BuildError for the first that does not compile."""
    built: dict[str, jit.Binary] = {}
    for name, result in jit.build_many(sources, progress=sys.stderr.isatty()).items():
        if isinstance(result, Exception):
            raise result
        built[name] = result
    return built


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def add_rows(
    results: harness.Results, sizes: tuple[int, int, int], steps: list[Measured], timings: dict[str, Timing]
) -> None:
    """Add a row for each step: time, rate, share of the peaks, gain over the previous step, resources of the kernel.

    The rows of peaks must be there already.
    """
    ceiling = harness.CEILINGS.get(results.env.gpu)
    peaks = {row["unit"]: float(str(row["tops"])) for row in results.rows}
    m, n, k = sizes
    ops = 2.0 * m * n * k
    library = timings.get(LIBRARY)
    previous = math.nan
    for step in steps:
        timing = timings[step.variant.name]
        tops = ops / timing.median_us / 1e6
        row: dict[str, object] = {
            "step": step.step,
            "title": step.title,
            "m": m,
            "n": n,
            "k": k,
            "tops": round(tops, 2),
        }
        if ceiling:
            row["tensor_peak_pct"] = round(100e12 * tops / ceiling.int8_ops, 2)
        if step.unit in peaks:
            row |= {"unit": step.unit, "unit_peak_pct": round(100 * tops / peaks[step.unit], 1)}
        if not math.isnan(previous):
            row["x_previous"] = round(previous / timing.median_us, 3)
        if library:
            row["x_cublaslt"] = round(library.median_us / timing.median_us, 4)
        results.add(timing, **row, **step.occupied, kernel=step.kernel)
        previous = timing.median_us


def add_peaks(results: harness.Results, peaks: list[PeakRun], timings: dict[str, Timing]) -> None:
    """A row for each unit's measured peak."""
    for run in peaks:
        timing = timings[run.variant.name]
        results.add(
            timing,
            step="mma_sync_peak" if run.unit == "mma" else "dp4a_peak",
            title=f"{'mma.sync' if run.unit == 'mma' else 'dp4a'} from registers",
            tops=round(run.ops / timing.median_us / 1e6, 2),
            unit=run.unit,
            macs_per_cycle_sm=round(run.macs_per_cycle, 1),
            **run.occupied,
            kernel=run.name,
        )


def add_counters(results: harness.Results, size: int) -> None:
    """Launch each step's kernel once more under ncu and add the counters to its row, or print why ncu failed."""
    rows = {str(row["kernel"]).split()[0]: row for row in results.rows if row["step"] in NAMES}
    program = harness.command(__name__, "--size", str(size), "--profile", ",".join(rows))
    try:
        found = counters.profile(program)
    except counters.CountersError as error:
        print(f"no counters: {error}")
        return
    others = [name for name in found if name not in rows]
    for kernel, row in rows.items():
        name = kernel if kernel in found else next(iter(others), "") if row["step"] == LIBRARY else ""
        row.update(counters.columns(found.get(name, {})) | {"counters_at": size})


def profile(size: int, kernels: list[str]) -> int:
    """Launch the named kernels once each where a profiler looks."""
    data = Operands.random(size, size, size, copies=1)
    gpu = launch_plans.target(torch.cuda.current_device())
    calls: list[Callable[[], object]] = []
    ours = [kernel for kernel in kernels if not kernel.startswith(LIBRARY)]
    has_cutlass = any(kernel.startswith(f"qcut_{INT8_CUTLASS.name}") for kernel in ours)
    for step in STEPS:
        if is_cutlass(step) and not has_cutlass:
            continue
        wanted = [c for c in step.candidates(size, size, size, gpu) if c.source.name in ours]
        for name, binary in build(c.source for c in wanted).items():
            candidate = next(c for c in wanted if c.source.name == name)
            calls.append(functools.partial(kernel_variant(candidate, binary, data)[0].call, 0))
    for kernel in kernels:
        if kernel.startswith(LIBRARY):
            gemm, algorithm = Int8Matmul(size, size, size), int(kernel.split(":")[1])
            calls.append(functools.partial(gemm.run, data.a, data.b[0], data.d, 1.0, algorithm))
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


# ── the script ───────────────────────────────────────────────────────────────────────────────────


def _size(text: str) -> int:
    if int(text) < 128 or int(text) % 128:
        raise argparse.ArgumentTypeError(f"{text}: a multiple of 128, which the first steps' tiles divide")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=_size, default=4096, help="M, N and K: a multiple of 128")
    parser.add_argument(
        "--steps",
        type=harness.list_of(NAMES),
        default=",".join(NAMES),
        help="which steps to climb: all of them by default",
    )
    parser.add_argument("--ncu", action="store_true", help="add hardware counters, where ncu is there and allowed")
    parser.add_argument(
        "--ncu-size", type=_size, metavar="SIZE", help="size at which counters are read: that of --size"
    )
    parser.add_argument("--profile", metavar="KERNELS", help="launch these once each, and nothing else (for --ncu)")


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 where a step was wrong, 2 without a GPU."""
    if options.profile:
        return profile(options.size, options.profile.split(","))
    names = options.steps
    results = harness.Results("bench_ladder", harness.environment())
    clock = harness.CudaClock()
    data = Operands.random(options.size, options.size, options.size)
    steps, wrong = our_steps([step for step in STEPS if step.name in names], data, clock)
    peaks = [PeakRun(unit) for unit in PEAKS]
    others = [peak.variant for peak in peaks]
    if LIBRARY in names:
        try:
            library = library_step(data, clock)
            steps.append(library)
            others.append(library.variant)
        except CublasLtError as error:
            print(f"{LIBRARY}: {error}")
    _, failed = harness.checked(others, print)
    wrong += failed
    steps = [step for step in steps if step.variant.name not in failed]
    peaks = [peak for peak in peaks if peak.variant.name not in failed]
    deadline = time.monotonic() + options.time_budget
    variants = [*(step.variant for step in steps), *(peak.variant for peak in peaks)]
    timings = harness.measure(variants, clock, rounds=7 if options.quick else 15, deadline=deadline)
    add_peaks(results, peaks, timings)
    add_rows(results, data.sizes, steps, timings)
    del data
    if options.ncu:
        results.write_csv(options.out)
        add_counters(results, options.ncu_size or options.size)
    path = results.write_csv(options.out)
    report.plot(options.out / "bench_ladder", results)
    page = report.write_markdown(options.out / "bench_ladder.md", results)
    print(report.text_table(results))
    print(report.summary(results))
    print(f"{len(steps)} steps measured, {len(wrong)} wrong; rows in {path}, tables in {page}")
    return 1 if wrong else 0
