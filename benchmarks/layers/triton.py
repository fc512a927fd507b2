"""Layers on the Triton back end against the CUDA back end: the same layers and tokens.

A call includes the rotation or quantization of its tokens. Triton takes seconds to compile a kernel, and compiles every
tile of a list before the first call of a size: `TRITON_CACHE_DIR` keeps the binaries.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Timing, Variant
from benchmarks.layers.linear import qcut_layer
from benchmarks.layers.shapes import Shape
from benchmarks.publish import plots

PATHS = ("fused", "portable")
SCHEMES = ("w8a8", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook3", "codebook2")
NK = ((14336, 4096), (4096, 14336))
FEW = (1, 8, 64)
PROMPTS = (4096,)
TO_REACH = {"few": 0.5, "prompts": 0.7}
"""Of the CUDA back end's speed."""
KEY = ("m", "n", "k", "variant")
EXACT = ("w8a8", "int16x8", "codebook4_int8")
NEAR = 2.0**-8
"""Largest relative error of a result of 16-bit products, between the back ends."""


def shapes_of(few: Sequence[int], prompts: Sequence[int], quick: bool) -> list[Shape]:
    """Every number of tokens at every weight; ``quick`` keeps the first weight."""
    return [Shape(m, n, k) for n, k in (NK[:1] if quick else NK) for m in (*few, *prompts)]


def kind_of(m: int) -> str:
    """The key of `TO_REACH` for m tokens."""
    return "prompts" if m in PROMPTS else "few"


@functools.cache
def layers_of(scheme: str, n: int, k: int) -> Sequence[qcut.Linear]:
    """A layer in copies that together evict the L2."""
    linear = nn.Linear(k, n, dtype=torch.float16, device="cuda")
    nn.init.normal_(linear.weight, std=k**-0.5)
    layer = qcut_layer(linear, scheme, torch.randn(64, k, device="cuda").half())
    copies = min(harness.MAX_COPIES, harness.rotation(int(layer.weight_bytes)))
    return [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]


def variants_of(scheme: str, shape: Shape) -> list[Variant]:
    """A scheme on both back ends; the results are checked by the CUDA back end's."""
    layers = layers_of(scheme, shape.n, shape.k)
    x = torch.randn(shape.m, shape.k, device="cuda").half()
    # A first call copies a layer's constants to the device, which no graph can capture.
    want, *_ = [layer(x) for layer in layers]
    return [
        Variant(f"{scheme}:{path}", on_path(path, layers, x), len(layers), checks(path, scheme, layers[0], x, want))
        for path in PATHS
    ]


def on_path(path: str, layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[int], Tensor]:
    """Calls one of the layers on a back end."""

    def call(i: int) -> Tensor:
        with qcut.execution_path(path):
            return layers[i](x)

    return call


def checks(path: str, scheme: str, layer: nn.Module, x: Tensor, want: Tensor) -> Callable[[], None]:
    """Raises if a result differs from the CUDA back end's: in any bit with int8 products, else beyond `NEAR`."""

    def check() -> None:
        got = on_path(path, [layer], x)(0)
        error = float((got.double() - want.double()).norm() / want.double().norm())
        if not (torch.equal(got, want) if scheme in EXACT else error <= NEAR):
            raise harness.CheckError(f"{scheme} on the path {path}: relative error {error:.2e}")

    return check


def add_rows(results: harness.Results, shape: Shape, timings: dict[str, Timing]) -> None:
    """One CSV row per variant."""
    for name, timing in timings.items():
        scheme = name.partition(":")[0]
        bits = {"w8a8": 8, "w8a16": 8, "int16x8": 8, "codebook3": 3, "codebook2": 2}.get(scheme, 4)
        moved = shape.bytes_moved(16, bits, 16)
        fused = timings.get(f"{scheme}:fused")
        ratio = round(fused.median_us / timing.median_us, 4) if fused else math.nan
        product_bits = 8 if scheme in ("w8a8", "codebook4_int8") else 16
        results.add_gemm(timing, shape, name, moved, product_bits, x_fused=ratio)


def summary(rows: Sequence[dict[str, object]]) -> str:
    """The least speed of the Triton back end, by scheme, for few tokens and for prompts, with the target."""
    least: dict[tuple[str, str], float] = {}
    for row in rows:
        scheme, _, path = str(row["variant"]).partition(":")
        ratio = float(str(row["x_fused"]))
        if path == "portable" and not math.isnan(ratio):
            key = scheme, kind_of(int(str(row["m"])))
            least[key] = min(ratio, least.get(key, math.inf))
    lines = []
    for (scheme, kind), ratio in least.items():
        verdict = "reached" if ratio >= TO_REACH[kind] else "NOT reached"
        lines.append(f"{scheme}, {kind}: at least {ratio:.2f} of CUDA's speed (target {TO_REACH[kind]}): {verdict}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES], help="schemes to measure")
    parser.add_argument("--few", nargs="*", type=int, default=[*FEW], help="numbers of few tokens")
    parser.add_argument("--prompts", nargs="*", type=int, default=[*PROMPTS], help="numbers of a prompt's tokens")


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if the back ends differ, 2 without a GPU."""
    torch.manual_seed(0)
    results = harness.Results("bench_portable", harness.environment())
    clock, deadline = harness.CudaClock(), time.monotonic() + options.time_budget
    shapes = shapes_of(options.few, options.prompts, options.quick)
    wrong, path = 0, results.write_csv(options.out, KEY)
    ratios: dict[str, list[float]] = {scheme: [math.nan] * len(shapes) for scheme in options.schemes}
    for i, shape in enumerate(shapes):
        for scheme in options.schemes:
            if time.monotonic() > deadline:
                break
            variants = variants_of(scheme, shape)
            timings, failed = harness.timed(shape.name, variants, clock, options, deadline, min_rounds=3)
            wrong += failed
            add_rows(results, shape, timings)
            times = [
                timings[f"{scheme}:{path}"].median_us if f"{scheme}:{path}" in timings else math.nan for path in PATHS
            ]
            ratios[scheme][i] = times[0] / times[1]
            path = results.write_csv(options.out, KEY)  # keeps the rows if a later kernel takes too long
            print(
                f"{shape.name}: {scheme}: CUDA {times[0]:.1f} µs, Triton {times[1]:.1f} µs, {ratios[scheme][i]:.2f}",
                flush=True,
            )
    title = f"the Triton back end on {results.env.gpu}"
    plots.ratios(
        options.out / "bench_portable", [s.name for s in shapes], ratios, title, "speed relative to the CUDA back end"
    )
    print(summary(results.rows))
    print(f"{len(results.rows)} rows in {path}, {wrong} wrong results")
    return 1 if wrong else 0
