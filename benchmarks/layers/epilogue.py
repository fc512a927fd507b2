"""The gain of one visitor node: the SM90 epilogue with ``qcut::Sm90Dequantize`` against CUTLASS's stock visitors.

Both kernels have the same tile, schedule, cluster and tile walk and compute the same function, rounding by rounding.
The stock tree fetches every vector with a node of its own (``Sm90RowBroadcast``, ``Sm90ColBroadcast``) and has one
``Sm90Compute`` for each operation; qcut's node fetches all of them and computes. Requantization to int8 is the same
``Sm90Compute`` in both. float16 output has W8A8's dynamic epilogue (both scales, bias), int8 output the one of
``layers/gemm.py`` (a zero point per token besides).
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Timing, Variant
from benchmarks.layers import gemm
from benchmarks.layers.gemm import OUTPUTS, Operands
from benchmarks.layers.shapes import Shape
from qcut import jit
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import KernelSource
from qcut.emitters.families import INT8_CUTLASS
from qcut.emitters.gemm.cutlass import text as cutlass_text
from qcut.emitters.gemm.cutlass.epilogue import EpilogueGraph
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.schemes import padded_k

ARCH = "sm_90a"
SHAPES = (Shape(4096, 1280, 1280), Shape(1024, 1280, 1280), Shape(4096, 5120, 1280), Shape(4096, 4096, 4096))
QUICK_SHAPES = (SHAPES[0], SHAPES[-1])
EPILOGUES = {"s8": gemm.EPILOGUES["s8"], "f16": Epilogue(row_scale="per_token", col_scale="per_channel", bias=True)}
FIXED = Choice("int8_cutlass", TileConfig((128, 128, 128), cluster_shape=(2, 1), schedule="pingpong"), reason="fixed")
"""A fixed tile for every shape, in addition to dispatch's choice."""
NODE, STOCK = "one_node", "stock_tree"


class StockTree(EpilogueGraph):
    """The SM90 graph with stock visitors: a node for each vector and each operation, as on SM80."""

    def _dequantize_sm90(self) -> Any:
        return self._dequantize_sm80()


def emit_node(problem: GemmProblem, tile: TileConfig) -> KernelSource:
    """The kernel as qcut runs it."""
    return INT8_CUTLASS.emit(problem, tile, ARCH)


def emit_stock(problem: GemmProblem, tile: TileConfig) -> KernelSource:
    """The same kernel with the stock visitor tree, under a name of its own."""
    with mock.patch.object(cutlass_text, "EpilogueGraph", StockTree):
        source = INT8_CUTLASS.emit(problem, tile, ARCH)
        text, host_text = source.text, source.host_text  # written now, with the stock tree
    name = f"{source.name}_stock"
    assert host_text is not None
    text, host_text = (t.replace(source.name, name) for t in (text, host_text))
    return replace(source, name=name, entry=name, text=text, host_text=host_text)


@dataclass(frozen=True)
class Case:
    """One shape, output type and tile, for which both kernels are compared."""

    shape: Shape
    output: str
    choice: Choice

    @property
    def picked_by(self) -> str:
        """Whether the tile is dispatch's or the fixed one."""
        return "benchmark" if self.choice == FIXED else "dispatch"

    @functools.cached_property
    def sources(self) -> dict[str, KernelSource]:
        """The kernel of each variant."""
        problem, tile = GemmProblem(epilogue=EPILOGUES[self.output]), self.choice.tile
        assert isinstance(tile, TileConfig)
        return {NODE: emit_node(problem, tile), STOCK: emit_stock(problem, tile)}


def cases(gpu: Target, shapes: Iterable[Shape] = SHAPES) -> list[Case]:
    """Every shape with both outputs: dispatch's tile, then the fixed one if it differs."""
    found = []
    for shape in shapes:
        for output, epilogue in EPILOGUES.items():
            picked = dispatch.select_gemm(GemmProblem(epilogue=epilogue), shape.m, shape.n, padded_k(shape.k), gpu)
            choices = (picked, FIXED) if picked.tile != FIXED.tile else (picked,)
            found += [Case(shape, output, choice) for choice in choices]
    return found


def expected(data: Operands, output: str) -> Tensor:
    """What both kernels must return for weight copy 0."""
    if EPILOGUES[output].zero_point == "none":
        data = replace(data, zero_point=torch.zeros_like(data.zero_point))
    return data.expected(OUTPUTS[output])


def require_same_bits(got: Tensor, want: Tensor) -> None:
    """Raise `CheckError` unless every bit agrees, the signs of zeros included."""
    bits = torch.int8 if want.element_size() == 1 else torch.int16
    gemm.require_equal(got.view(bits), want.view(bits))


def kernel_variants(case: Case, binaries: dict[str, jit.Binary], data: Operands, gpu: Target) -> list[Variant]:
    """Return both kernels of a case, launched directly; each is checked bitwise against the expected result."""
    want = expected(data, case.output)
    m, n, k = case.shape.m, case.shape.n, case.shape.k
    tensors = {name: getattr(data, name) for name in ("a", "zero_point", "colsum", "row_scale", "col_scale", "bias")}
    values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    values |= {"m": m, "n": n, "k": k, "lda": k, "ldb": k, "ldd": n}
    values |= {"out_inv_scale": data.out_inv_scale, "out_zero_point": float(data.out_zero_point)}
    values |= {"sm_count": gpu.sm_count, "swizzle": case.choice.swizzle, "raster": case.choice.raster}
    values |= {"splits": case.choice.splits, "workspace": 0}

    def variant(kind: str, source: KernelSource) -> Variant:
        kernel = jit.load(binaries[source.name], source, torch.cuda.current_device())
        d = torch.empty_like(want)
        copies = [values | {"d": d.data_ptr(), "b": b.data_ptr()} for b in data.b]
        launches = [[copy[p.name] for p in source.params] for copy in copies]

        def call(i: int) -> Operands:
            kernel.launch((1, 1, 1), launches[i], torch.cuda.current_stream().cuda_stream, pdl=True)
            return data  # keeps the addresses' memory alive as long as the closure

        def check() -> None:
            d.fill_(-77)
            call(0)
            require_same_bits(d, want)

        return Variant(kind, call, len(launches), check)

    return [variant(kind, source) for kind, source in case.sources.items()]


def spill_bytes(binary: jit.Binary) -> float:
    """Bytes that a thread spills to local memory; NaN if ptxas's report was not understood."""
    return binary.resources.spill_store_bytes if binary.resources else math.nan


def add_rows(results: harness.Results, case: Case, timings: dict[str, Timing], binaries: dict[str, jit.Binary]) -> None:
    """One CSV row per variant."""
    shape = case.shape
    stock = timings.get(STOCK)
    for kind, timing in timings.items():
        name = case.sources[kind].name
        results.add(
            timing,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            output=case.output,
            variant=kind,
            tile=case.choice.tile.name,
            picked_by=case.picked_by,
            swizzle=case.choice.swizzle,
            raster=case.choice.raster,
            tops=round(shape.ops / timing.median_us / 1e6, 2),
            x_stock=round(stock.median_us / timing.median_us, 4) if stock else math.nan,
            spill_bytes=spill_bytes(binaries[name]),
            kernel=name,
        )


def summary(speedups: Mapping[Case, float]) -> str:
    """The node's speed over the stock tree's: geometric mean, least and most, by output and by who picked the tile."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in speedups:
        groups.setdefault((case.output, case.picked_by), []).append(case)
    rows: list[list[object]] = []
    for (output, picked_by), group in groups.items():
        least, most = (extreme(group, key=lambda case: speedups[case]) for extreme in (min, max))
        mean = harness.geomean(speedups[case] for case in group)
        ends = [x for case in (least, most) for x in (speedups[case], case.shape.name)]
        rows.append([output, picked_by, len(group), mean, *ends])
    return harness.table(["output", "tile by", "cases", "geomean ×", "least ×", "at", "most ×", "at"], rows)


@harness.script(harness.timing_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result was wrong, 2 without a GPU of compute capability 9.0."""
    from qcut.backends.cuda.launch.plans import target

    gpu = target(torch.cuda.current_device())
    if gpu.arch != ARCH:
        print(
            f"This benchmark needs a GPU of compute capability 9.0; {gpu.name} runs {gpu.arch} code.", file=sys.stderr
        )
        return 2
    return run(options, gpu)


def run(options: argparse.Namespace, gpu: Target) -> int:
    """Build, check, measure, print and write everything."""
    results = harness.Results("bench_epilogue", harness.environment())
    todo = cases(gpu, QUICK_SHAPES if options.quick else SHAPES)
    sources = [source for case in todo for source in case.sources.values()]
    binaries: dict[str, jit.Binary] = {}
    for name, built in jit.build_many(sources, progress=sys.stderr.isatty()).items():
        if isinstance(built, Exception):
            raise built
        binaries[name] = built
    clock = harness.CudaClock()
    deadline = time.monotonic() + options.time_budget
    speedups: dict[Case, float] = {}
    table: list[list[object]] = []
    failures = 0
    for case in todo:
        if time.monotonic() > deadline:
            break
        shape, tile = case.shape, case.choice.tile.name
        variants = kernel_variants(case, binaries, Operands.random(shape), gpu)
        timings, wrong = harness.timed(f"{shape.name} {case.output} {tile}", variants, clock, options, deadline)
        failures += wrong
        add_rows(results, case, timings, binaries)
        node, stock = (timings[kind].median_us if kind in timings else math.nan for kind in (NODE, STOCK))
        if not wrong:
            speedups[case] = stock / node
        spilled = spill_bytes(binaries[case.sources[STOCK].name])
        table.append([shape.m, shape.n, shape.k, case.output, tile, case.picked_by, node, stock, stock / node, spilled])
    path = results.write_csv(options.out)
    header = ["M", "N", "K", "output", "tile", "picked by", f"{NODE} µs", f"{STOCK} µs", "×", "stock spills B"]
    print(harness.table(header, table))
    print(f"{len(table)} of {len(todo)} cases measured, {failures} wrong results; rows in {path}")
    print(summary(speedups))
    return 1 if failures else 0
