"""One token's product with a long K: a CTA that reads all of it, against clusters, alone and in a decoder's step.

    python benchmarks/bench_units.py [--shapes 4096x14336,8192x28672] [--schemes codebook4,codebook4_int8]
                                     [--models llama-3-8b-codebook4] [--rounds 6]

Products rotate their token, as a step's do, and run in graphs under dependent launch over copies of the weights that
together exceed the L2. Tiles are those of `qcut.dispatch.tiles.codebook.stream_tile` with ``PACKED`` 0 and 2, and other
packed ones. Results are compared with a float64 product first. Steps are those of engines of either kind, in turns.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qcut
from benchmarks import harness
from benchmarks.bench_codebook import (
    _book,
    codebook_problem,
    copies_of,
    float_layer,
    reference_of,
    tolerance_of,
    weight_bytes,
)
from benchmarks.bench_engine import CASES, NEW, PROMPT, build, decode_us, prompts_of
from benchmarks.bench_gemm import require_close
from benchmarks.harness import Variant
from qcut.cuda import codebook as codebook_cuda
from qcut.cuda.plans import LaunchSpec, target, watched_loads
from qcut.dispatch import codebook as dispatch
from qcut.dispatch.tiles import codebook as tiles
from qcut.emitters.core.constraints import holds
from qcut.emitters.core.source import DType
from qcut.emitters.stream.codebook import CONSTRAINTS, CodebookStreamTile
from qcut.layers.rotations import RotationSpec, rotation_for
from qcut.tuning.timing import CudaClock

GB_S = 4480
"""Bandwidth that rows are held against."""


def chosen(packed: int, problem: Any, n: int, units: int, gpu: Any) -> CodebookStreamTile:
    """The tile that dispatch chooses for one token with ``PACKED`` as given."""
    before, tiles.PACKED = tiles.PACKED, packed
    try:
        return tiles.stream_tile(problem, 1, n, units, gpu)
    finally:
        tiles.PACKED = before


def candidates(problem: Any, n: int, units: int, gpu: Any) -> Iterator[tuple[str, CodebookStreamTile]]:
    """Names and tiles: clusters, what dispatch takes instead, and other packed tiles."""
    yield "cluster", chosen(0, problem, n, units, gpu)
    new = chosen(2, problem, n, units, gpu)
    yield "chosen", new
    for each in (2, 4, 6, 8):
        for alone in (False, True):
            rows = -(-n // (16 * gpu.sm_count))
            tile = CodebookStreamTile(1, rows, -(-units // each), each, packed=2, alone=alone)
            if tile != new and holds(CONSTRAINTS, problem, tile, gpu.arch):
                yield tile.name, tile


def launches_of(
    layers: list[Any], x: Tensor, tile: CodebookStreamTile
) -> tuple[list[Callable[[], None]], list[Tensor]]:
    """A launch of each layer's product on a tile, and the results' memory."""
    first, device = layers[0], torch.cuda.current_device()
    gpu, problem = target(device), codebook_problem(first, bias=False, rotates=DType.F16)
    n, units, k = first.out_features, first.units.shape[1], first.in_features
    choice = dispatch.CodebookChoice("codebook_stream", tile)
    source, grid = dispatch.emit(choice, problem, gpu.arch), dispatch.grid(choice, n, gpu.sm_count)
    plan = LaunchSpec(source, grid, pdl=True).load(device)
    spec = RotationSpec(first.kind, first.group_size, k, first.scheme.seeds)
    signs = rotation_for(spec).operands(x.dtype, x.device)
    outs = [torch.empty((1, n), dtype=x.dtype, device="cuda") for _ in layers]

    def launch(layer: Any, out: Tensor) -> Callable[[], None]:
        fold = (layer.fold.data_ptr(),) if first.int8 else ()
        operands = (x.data_ptr(), signs.data_ptr(), layer.units.data_ptr(), layer.packed_norms.data_ptr(), *fold)
        sizes = (1, n, units, k, units // len(first.scheme.seeds), n)
        book = _book(layer, torch.int8 if first.int8 else x.dtype)
        args = (*operands, out.data_ptr(), *sizes, *book, layer.col_scale.data_ptr())

        def call(keep: tuple[Tensor, ...] = (signs, x)) -> None:  # signs live as long as the launch
            plan.launch(1, args, torch._C._cuda_getCurrentRawStream(device))

        return call

    return [launch(layer, out) for layer, out in zip(layers, outs, strict=True)], outs


def _call(calls: list[Callable[[], None]], i: int) -> None:
    calls[i]()


def _check(call: Callable[[], None], out: Tensor, reference: Tensor, tolerance: float) -> None:
    call()
    torch.cuda.synchronize()
    require_close(out, reference, tolerance)


def products(n: int, k: int, scheme: str, rounds: int) -> None:
    """Time the tiles of one product."""
    layers = copies_of(qcut.Linear.from_float(float_layer(n, k), scheme), weight_bytes(scheme, n, k))
    x = torch.randn(1, k, device="cuda").half()
    reference = reference_of(layers[0], x)
    problem, gpu = codebook_problem(layers[0], bias=False, rotates=DType.F16), target(torch.cuda.current_device())
    variants = []
    for name, tile in candidates(problem, n, layers[0].units.shape[1], gpu):
        calls, outs = launches_of(layers, x, tile)
        label = name if name == tile.name else f"{name} {tile.name}"
        check = functools.partial(_check, calls[0], outs[0], reference, tolerance_of(scheme))
        variants.append(Variant(label, functools.partial(_call, calls), len(layers), check))
    report = functools.partial(print, f"{scheme} {n}x{k}:")
    good, wrong = harness.checked(variants, report)
    assert not wrong, wrong
    timings = harness.measure(good, CudaClock(), rounds=rounds, report=report)
    limit = weight_bytes(scheme, n, k) / GB_S / 1e3
    for name, timing in timings.items():
        print(f"{scheme} 1x{n}x{k} {name}: {timing.median_us:.2f} us, memory alone {limit:.2f}", flush=True)


def steps(name: str, rounds: int) -> None:
    """Time steps of one sequence of engines whose products take clusters, and do not."""
    case = replace(CASES[name], prefill={}, first={}, decode={1: 0.0})
    model, prompts = build(case, "cuda"), prompts_of(case.vocabulary, 1, PROMPT)
    engines, before = {}, tiles.PACKED
    for packed in (0, 2):
        tiles.PACKED = packed
        codebook_cuda._product_plans.clear()
        engines[packed] = qcut.Engine(model, batch=1, context=PROMPT + NEW)
        with watched_loads() as loaded:
            engines[packed].generate(prompts, NEW)
        print(f"{name} PACKED={packed}:", *sorted({kernel for kernel in loaded if "codebook_stream" in kernel}))
    tiles.PACKED = before
    codebook_cuda._product_plans.clear()
    found: dict[int, list[float]] = {packed: [] for packed in engines}
    for turn in range(rounds):
        for packed in sorted(engines, reverse=turn % 2 == 1):
            found[packed].append(decode_us(engines[packed], prompts, NEW, 1).median_us)
    for packed, us in found.items():
        print(f"{name} step PACKED={packed}: {statistics.median(us):.1f} us ({min(us):.1f} to {max(us):.1f})")
    gain = statistics.median(old - new for old, new in zip(found[0], found[2], strict=True))
    print(f"{name} step: {gain:.1f} us saved", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4096x14336,8192x28672", help="NxK, comma-separated")
    parser.add_argument("--schemes", default="codebook4,codebook4_int8")
    parser.add_argument("--models", default="llama-3-8b-codebook4", help="cases of bench_engine.py; none for ''")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    harness.require_gpu()
    torch.manual_seed(0)
    start = time.perf_counter()
    print(torch.cuda.get_device_name(), flush=True)
    with torch.no_grad():
        for shape in options.shapes.split(","):
            n, k = map(int, shape.split("x"))
            for scheme in options.schemes.split(","):
                products(n, k, scheme, options.rounds)
        for name in filter(None, options.models.split(",")):
            steps(name, options.rounds)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
