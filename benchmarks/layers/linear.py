"""`qcut.Linear` with its activation quantization, against float16 ``nn.Linear``.

The layers have a bias, the tokens are float16. `benchmarks.layers.peers` measures other libraries.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Timing, Variant
from benchmarks.layers import device_kernels, float8
from benchmarks.layers.gemm import require_close
from benchmarks.layers.shapes import GPT2_LARGE_NK, GPT2_LARGE_TOKENS, Shape, linear_shapes
from benchmarks.publish import plots
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType

BASELINE = "fp16"
SCHEMES = ("w8a8", "w8a8_static", "w8a16", "fp8", "fp8_blocks", "fp8_dynamic", "fp8_static", "int16x8")
KEY = ("m", "n", "k", "variant")
EPILOGUES = {
    "w8a8": Epilogue(row_scale="per_token", col_scale="per_channel", bias=True),
    "w8a8_static": Epilogue(zero_point="per_tensor", col_scale="per_channel", bias=True),
    "int16x8": Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, halves=True),
}
W8A16_EPILOGUE = Epilogue(col_scale="per_channel", bias=True)
HEADLINE = (Shape(4096, 14336, 4096), 350.0)
"""Shape and microseconds to reach with W8A8 dynamic."""


def tolerance(name: str) -> float:
    """Largest relative error of a whole result: float16's rounding, or the quantization error.

    For Gaussian data the largest of K values is about 4.5 standard deviations, so a step is 4.5/127 of
    one and its rounding error 1.0 % on each side; weights of 8-bit floats lose up to 6 %.
    """
    if name.startswith("qcut_fp8"):
        return float8.TOLERANCE
    return 2e-3 if name == BASELINE else 0.03


def qcut_layer(linear: nn.Linear, scheme: str, x: Tensor) -> qcut.Linear:
    """Quantize a layer; the static range is that of the tokens it will see."""
    lo, hi = x.aminmax()
    static_range = qcut.StaticRange.including_zero(float(lo), float(hi)) if scheme.endswith("_static") else None
    return qcut.Linear.from_float(linear, scheme, static_range=static_range)


def variant(name: str, layers: list[Callable[[Tensor], Tensor]], x: Tensor, reference: Tensor) -> Variant:
    """One layer in copies, checked against float64."""

    def call(i: int) -> Tensor:
        return layers[i](x)

    return Variant(name, call, len(layers), lambda: require_close(call(0), reference, tolerance(name)))


def variants_of(shape: Shape, most: int = harness.MAX_COPIES, schemes: Sequence[str] = SCHEMES) -> list[Variant]:
    """Return the variants of a shape in a limited number of copies."""
    m, n, k = shape.m, shape.n, shape.k
    linear = nn.Linear(k, n, dtype=torch.float16, device="cuda")
    nn.init.normal_(linear.weight, std=k**-0.5)
    x = torch.randn(m, k, device="cuda").half()
    reference = x.double() @ linear.weight.double().t() + linear.bias.double()

    def copies(bits: int) -> int:
        return min(most, harness.rotation(n * k * bits // 8))

    floats = [linear, *(copy.deepcopy(linear) for _ in range(copies(16) - 1))]
    out = [variant(BASELINE, [*floats], x, reference)]
    for scheme in schemes:
        layer = qcut_layer(linear, scheme, x)
        layers = [layer, *(copy.deepcopy(layer) for _ in range(copies(8) - 1))]
        out.append(variant(f"qcut_{scheme}", [*layers], x, reference))
        if scheme == "fp8_dynamic" and torch.cuda.get_device_capability() >= (8, 9) and n % 16 == k % 16 == 0:
            out += float8.products(layers, x, reference)
    return out


def add_rows(results: harness.Results, shape: Shape, timings: dict[str, Timing], names: dict[str, str]) -> None:
    """One CSV row per variant."""
    for name, timing in timings.items():
        moved = shape.bytes_moved(16, 16 if name == BASELINE else 8, 16)
        in_bytes = ("w8a8", "fp8_dynamic", "fp8_static", "fp8_product", "scaled_mm")
        bits = 8 if any(part in name for part in in_bytes) else 16
        x_fp16 = round(timings[BASELINE].median_us / timing.median_us, 4) if BASELINE in timings else math.nan
        results.add_gemm(timing, shape, name, moved, bits, x_fp16=x_fp16, kernel=names.get(name, ""))


def summary(measured: dict[Shape, dict[str, Timing]]) -> str:
    """Return the targets and the measured figures."""
    lines = []
    shape, limit = HEADLINE
    if "qcut_w8a8" in measured.get(shape, {}):
        us = measured[shape]["qcut_w8a8"].median_us
        verdict = "reached" if us <= limit else "NOT reached"
        lines.append(f"W8A8 dynamic at {shape.name}: {us:.1f} µs (to reach {limit:.0f}): {verdict}")
    for m in GPT2_LARGE_TOKENS:
        for n, k in GPT2_LARGE_NK:
            timings = measured.get(Shape(m, n, k), {})
            if {"qcut_w8a8", BASELINE} <= timings.keys():
                ratio = timings[BASELINE].median_us / timings["qcut_w8a8"].median_us
                verdict = "reached" if ratio > 1 else "NOT reached"
                lines.append(f"GPT-2 Large {n}x{k}, M = {m}: {ratio:.2f}x fp16 (to reach > 1): {verdict}")
    return "\n".join(lines)


def write(results: harness.Results, out: Path, *, whole: bool) -> Path:
    """Write the CSV: from scratch with all variants and shapes, else with the kept rows of other variants."""
    if whole:
        return results.write_csv(out)
    path = out / f"{results.bench}.csv"
    if path.is_file():
        kept = {tuple(row[column] for column in KEY) for row in harness.read_rows(path) if row["variant"] == BASELINE}
        results.rows = [row for row in results.rows if tuple(str(row[column]) for column in KEY) not in kept]
    return results.write_csv(out, KEY)


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-names", action="store_true", help="do not profile the names of float16's kernels")
    parser.add_argument(
        "--schemes",
        nargs="+",
        choices=SCHEMES,
        default=SCHEMES,
        help="measure these and float16; rows of other variants, and of float16, in the CSV are kept",
    )
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="MxNxK", help="measure these instead of all")


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result of qcut's was wrong, 2 without a GPU."""
    torch.manual_seed(0)
    results = harness.Results("bench_linear", harness.environment())
    shapes, schemes = options.shapes or linear_shapes(options.quick), tuple(options.schemes)
    epilogues = {f"qcut_{s}": EPILOGUES[s] for s in schemes if s in EPILOGUES}
    chosen = device_kernels.prebuild((e, s.m, s.n, s.k) for s in shapes for e in epilogues.values())
    if "w8a16" in schemes:
        chosen |= device_kernels.prebuild(((W8A16_EPILOGUE, s.m, s.n, s.k) for s in shapes), DType.F16)
    float8.prebuild(schemes, shapes)
    clock = harness.CudaClock()
    deadline = time.monotonic() + options.time_budget
    measured: dict[Shape, dict[str, Timing]] = {}
    failures = 0
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        report = functools.partial(print, f"{shape.name}:")
        good, wrong = harness.checked(variants_of(shape, schemes=schemes), report)
        failures += sum(name == BASELINE or name.startswith("qcut") for name in wrong)
        timings = harness.measure(good, clock, rounds=7 if options.quick else 15, deadline=deadline, report=report)
        names = {name: "quantize+" + chosen[e, shape.m, shape.n, shape.k] for name, e in epilogues.items()}
        if "w8a16" in schemes:
            names["qcut_w8a16"] = chosen[W8A16_EPILOGUE, shape.m, shape.n, shape.k]
        add_rows(results, shape, timings, names)
        measured[shape] = timings
    products = [name for name in float8.NAMES if any(name in timings for timings in measured.values())]
    columns = [BASELINE, *(f"qcut_{s}" for s in schemes), *products]
    rows = []
    for shape, timings in measured.items():
        times = [timings[c].median_us if c in timings else math.nan for c in columns]
        rows.append([shape.m, shape.n, shape.k, *times])
    whole = schemes == SCHEMES and not options.shapes
    path = write(results, options.out, whole=whole)
    if not options.no_names:
        for shape in measured:
            device_kernels.name_rows(results, shape, variants_of(shape, most=1, schemes=schemes))
        write(results, options.out, whole=whole)
    if not whole:
        print(harness.table(["M", "N", "K", *(f"{c} µs" for c in columns)], rows))
        print(f"{len(measured)} of {len(shapes)} shapes measured, {failures} wrong results; rows in {path}")
        return 1 if failures else 0
    plots.ratios(
        options.out / "bench_linear",
        [s.name for s in measured],
        {
            c: [
                t[BASELINE].median_us / t[c].median_us if {c, BASELINE} <= t.keys() else math.nan
                for t in measured.values()
            ]
            for c in columns[1:]
        },
        f"linear layers, float16 in and out, on {results.env.gpu}",
        "speed relative to float16 nn.Linear",
    )
    print(harness.table(["M", "N", "K", *(f"{c} µs" for c in columns)], rows))
    print(f"{len(measured)} of {len(shapes)} shapes measured, {failures} wrong results; rows in {path}")
    print(summary(measured))
    return 1 if failures else 0
