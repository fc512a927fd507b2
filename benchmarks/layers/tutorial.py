"""From a thread per element to wgmma: one int8 GEMM, step by step, each step checked bitwise and timed.

``D = clamp(rne(acc * col_scale[n] * out_inv_scale) + out_zero_point)`` of square matrices, the same arithmetic in every
kernel; cuBLASLt multiplies by one number. The first three kernels are short and written to be read (``tutorial.cuh``);
dispatch never chooses them. The others are the families that serve; a step with several kernels is represented by its
fastest. ``docs/kernel-notes/tutorial.md`` names the bottleneck that each step removes.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import CheckError, Variant
from benchmarks.layers.gemm import Operands, cublaslt_variant
from benchmarks.layers.shapes import Shape
from benchmarks.publish import plots
from qcut import jit
from qcut.backends.cuda.launch.plans import target
from qcut.dispatch.cost_model import occupancy
from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import MULTIPROCESSORS
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import require
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.core.text import kernel_source
from qcut.emitters.families import INT8_CUTLASS, INT8_DP4A, INT8_MMA, INT8_WMMA
from qcut.emitters.gemm.cutlass import tiles as cutlass_tiles
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.wmma import Int8Wmma
from qcut.tuning.cublaslt import CublasLtError

PROBLEM = GemmProblem(epilogue=Epilogue(DType.S8, col_scale="per_channel"))
LIBRARY = "cublaslt"
"""The last step, which is no kernel of qcut."""
OUT_INV_SCALE, OUT_ZERO_POINT = 0.5, 3
SLOW_US = 2000.0
"""A slower kernel reads one copy of its operands: the cost of fetching them cannot be seen."""


@dataclass(frozen=True)
class ShortTile:
    """One of the short kernels, with the CTA tile and the threads that it has in ``tutorial.cuh``."""

    step: str
    threadblock_shape: tuple[int, int, int]
    threads: int

    @property
    def name(self) -> str:
        """``{m}x{n}x{k}_{step}``."""
        return "x".join(map(str, self.threadblock_shape)) + f"_{self.step}"


SHORT = (
    ShortTile("naive", (16, 16, 1), 256),
    ShortTile("shared", (32, 32, 32), 1024),
    ShortTile("registers", (128, 128, 32), 256),
)


@dataclass(frozen=True)
class Candidate:
    """One kernel that a step may be: its source, the CTAs of its launch, and arguments after the epilogue's."""

    source: KernelSource
    grid: tuple[int, int, int]
    tail: tuple[int, ...] = ()


def short_kernel(tile: ShortTile, problem: GemmProblem, arch: str) -> KernelSource:
    """Text of a short kernel. Its arguments are ``problem.params()`` in order; results have the families' bits."""
    params = problem.params()
    return kernel_source(
        procedural_name("tutorial", arch, problem, tile),
        arch,
        params,
        *problem.epilogue.statements(params),
        f"qcut::tutorial::{tile.step}_gemm<Epilogue>(a, b, d, m, n, k, lda, ldb, ldd, args);",
        device_code=Path(__file__).with_suffix(".cuh").read_text(),
        block=tile.threads,
        waits=False,
    )


def short_grid(tile: ShortTile, m: int, n: int, k: int) -> tuple[int, int, int]:
    """CTAs of a launch; EmitError if a size is not a multiple of the tile's."""
    whole = all(size > 0 and size % side == 0 for size, side in zip((m, n, k), tile.threadblock_shape, strict=True))
    require(whole, f"kernel {tile.name}", f"takes only whole tiles, not M, N, K = {m}, {n}, {k}")
    return (n // tile.threadblock_shape[1], m // tile.threadblock_shape[0], 1)


def _large(family: Any, gpu: Target, n: int) -> Iterator[tuple[Any, tuple[int, int, int]]]:
    """The tiles of a family that suit large products, and the grid of each."""
    for tile in family.default_tiles(GemmProblem(), gpu.arch):
        bm, bn, _ = tile.threadblock_shape
        if bm * bn >= 128 * 128 and getattr(tile, "splits", 1) == 1:
            yield tile, family.grid(tile, n)(n)


def candidates(step: str, size: int, gpu: Target) -> list[Candidate]:
    """The kernels of a step on square matrices; none if the GPU lacks the step's instructions."""
    arch = gpu.arch
    if short := next((tile for tile in SHORT if tile.step == step), None):
        return [Candidate(short_kernel(short, PROBLEM, arch), short_grid(short, size, size, size))]
    if step == "wmma_double":
        tile = TileConfig((128, 128, 64), (64, 64, 64), stages=2)
        return [Candidate(Int8Wmma("linear").emit(PROBLEM, tile, arch), INT8_WMMA.grid(tile, size)(size))]
    if step == "cutlass_sm80":
        menu = [tile for tile in cutlass_tiles.SM80_MENU if math.prod(tile.threadblock_shape[:2]) >= 128 * 128]
        return [_cutlass(tile, gpu, 1, 0) for tile in menu if tile.splits == 1]
    if step == "cutlass_sm90":
        walks = (("128x128x128", 4, 1), ("64x256x128 c2x1", 8, 1)) if architecture(arch).wgmma else ()
        return [_cutlass(cutlass_tiles.tile("pingpong", spec), gpu, *walk) for spec, *walk in walks]
    family: Any = {"dp4a": INT8_DP4A, "wmma_blocked": INT8_WMMA, "mma_sync": INT8_MMA}[step]
    return [Candidate(family.emit(PROBLEM, tile, arch), grid) for tile, grid in _large(family, gpu, size)]


def _cutlass(tile: Any, gpu: Target, swizzle: int, raster: int) -> Candidate:
    return Candidate(INT8_CUTLASS.emit(PROBLEM, tile, gpu.arch), (1, 1, 1), (gpu.sm_count, swizzle, raster, 1, 0))


STEPS = (
    *(tile.step for tile in SHORT),
    "dp4a",
    "wmma_double",
    "wmma_blocked",
    "mma_sync",
    "cutlass_sm80",
    "cutlass_sm90",
    LIBRARY,
)


def square(size: int) -> Shape:
    """The product of two square matrices."""
    return Shape(size, size, size)


def check(d: Tensor, data: Operands) -> None:
    """Compare d with the epilogue of the exact sums, one float32 operation at a time."""
    v = (data.acc.float() * data.col_scale).double() * OUT_INV_SCALE
    wrong = int((d != (v.round() + OUT_ZERO_POINT).clamp(-128, 127)).sum())
    if wrong:
        raise CheckError(f"{wrong} of {d.numel()} elements differ")


def kernel_variant(candidate: Candidate, binary: jit.Binary, data: Operands) -> tuple[Variant, dict[str, object]]:
    """One kernel on the operands, and the resources that it occupies."""
    device = torch.cuda.current_device()
    kernel = jit.load(binary, candidate.source, device)
    size, d = len(data.a), torch.empty_like(data.a)
    tail = (data.col_scale.data_ptr(), OUT_INV_SCALE, float(OUT_ZERO_POINT), *candidate.tail)
    args = [(data.a.data_ptr(), b.data_ptr(), d.data_ptr(), *6 * (size,), *tail) for b in data.b]

    def call(i: int) -> None:
        kernel.launch(candidate.grid, args[i], torch.cuda.current_stream().cuda_stream)

    def checked() -> None:
        d.fill_(-77)
        call(0)
        check(d, data)

    occupied: dict[str, object] = {"threads": kernel.block}
    if found := kernel.resources:
        arch, smem = target(device).arch, kernel.smem_bytes + found.smem_bytes
        ctas = occupancy(arch, kernel.block, found.registers, smem)
        occupied |= {
            "registers": found.registers,
            "spill_bytes": found.spill_store_bytes + found.spill_load_bytes,
            "smem_bytes": smem,
            "ctas_per_sm": ctas,
            "occupancy_pct": round(100 * ctas * kernel.block / MULTIPROCESSORS[arch].threads, 1),
        }
    return Variant(candidate.source.name, call, len(args), checked), occupied


def fastest(step: str, data: Operands, clock: harness.Clock) -> tuple[Variant, dict[str, object]] | None:
    """The fastest kernel of a step and its resources; None, with a printed reason, if there is none.

    Raises:
        CheckError: a kernel of the step is wrong.
    """
    if step == LIBRARY:
        try:
            variant, configuration = cublaslt_variant(square(len(data.a)), data, clock)
            made: dict[str, tuple[Variant, dict[str, object]]] = {LIBRARY: (variant, {"configuration": configuration})}
        except CublasLtError as error:
            print(f"{step}: {error}")
            return None
    else:
        found = candidates(step, len(data.a), target(torch.cuda.current_device()))
        if step.startswith("cutlass") and not jit.is_toolchain_available("nvcc"):
            found = []
        binaries = jit.build_many([c.source for c in found], progress=sys.stderr.isatty())
        made = {}
        for candidate in found:
            binary = binaries[candidate.source.name]
            if isinstance(binary, Exception):
                raise binary
            made[candidate.source.name] = kernel_variant(candidate, binary, data)
    good, wrong = harness.checked([variant for variant, _ in made.values()], functools.partial(print, f"{step}:"))
    if wrong:
        raise CheckError(f"{step}: {', '.join(wrong)}")
    if not good:
        print(f"{step}: not here; it takes another architecture, or nvcc and g++")
        return None
    timings = harness.measure(good, clock, rounds=5, target_us=500)
    best = min(good, key=lambda variant: timings[variant.name].median_us)
    if timings[best.name].median_us > SLOW_US:
        best.copies = 1
    return next(of for of in made.values() if of[0] is best)


def _size(text: str) -> int:
    if int(text) < 128 or int(text) % 128:
        raise argparse.ArgumentTypeError(f"{text}: a multiple of 128, which the first steps' tiles divide")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=_size, default=4096, help="M, N and K: a multiple of 128")
    parser.add_argument("--steps", type=harness.list_of(STEPS), default=",".join(STEPS), help="all by default")


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a step was wrong, 2 without a GPU."""
    results = harness.Results("bench_tutorial", harness.environment())
    clock, data = harness.CudaClock(), Operands.random(square(options.size))
    try:
        steps = {step: found for step in options.steps if (found := fastest(step, data, clock))}
    except CheckError as error:
        print(f"wrong: {error}")
        return 1
    rounds = 7 if options.quick else 15
    timings = harness.measure([variant for variant, _ in steps.values()], clock, rounds=rounds)
    ceiling = harness.CEILINGS.get(results.env.gpu)
    previous = math.nan
    for step, (variant, occupied) in steps.items():
        timing = timings[variant.name]
        tops = 2.0 * options.size**3 / timing.median_us / 1e6
        row: dict[str, object] = {"step": step, "m": options.size, "n": options.size, "k": options.size}
        row["tops"] = round(tops, 2)
        if ceiling:
            row["tensor_peak_pct"] = round(100e12 * tops / ceiling.int8_ops, 2)
        if not math.isnan(previous):
            row["x_previous"] = round(previous / timing.median_us, 3)
        results.add(timing, **row, **occupied, kernel=variant.name)
        previous = timing.median_us
    path = results.write_csv(options.out)
    shown = ("step", "median_us", "tops", "x_previous", "registers", "spill_bytes", "smem_bytes", "ctas_per_sm")
    print(harness.table(shown, [[row.get(column, "") for column in shown] for row in results.rows]))
    plots.bars(
        options.out / "bench_tutorial",
        [str(row["step"]) for row in results.rows],
        [float(str(row["tops"])) for row in results.rows],
        {"int8 tensor peak": ceiling.int8_ops / 1e12} if ceiling else {},
        f"int8 GEMM step by step, {options.size}×{options.size}×{options.size}, on {results.env.gpu}",
        "TOPS",
    )
    print(f"{len(steps)} steps measured; rows in {path}")
    return 0
