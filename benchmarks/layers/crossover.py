"""Whole layers of every scheme against float16 ``nn.Linear``, from 1 to 4,096 tokens: where is a layer slower?

A row is one scheme at one shape. It also has float16's time, interleaved with the scheme's in the same call, so
that rows of several calls make one table: ``bench_crossover.csv`` in ``--out`` keeps the rows of cells that a call does
not measure. Layers have a bias and read float16 tokens; quantizing and rotating them counts. Weights rotate past the
L2, and every layer reads other tokens than the layer before it, since layers share the rotation of a common tensor.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Timing, Variant
from benchmarks.layers import float8
from benchmarks.layers.codebook import float_layer
from benchmarks.layers.gemm import require_close
from benchmarks.layers.linear import qcut_layer
from benchmarks.layers.shapes import Shape
from benchmarks.publish import plots
from benchmarks.publish.rows import Row
from qcut.schemes import parse_scheme

BASELINE = "fp16"
SCHEMES = ("w8a8", "w8a8_static", "w8a8_rotated", "w8a16", "codebook4", "codebook4_int8")
FLOAT8 = ("fp8_dynamic", "torch_fp8")
"""Layers of e4m3 tokens, qcut's and torch's, next to which ``--float8`` measures the others."""
FLOAT8_TOKENS = 64
"""Tokens from which on ``w8a8`` is to be no slower than these."""
NK = ((1280, 1280), (5120, 1280), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 192, 256, 384, 512, 1024, 4096)
QUICK_NK = ((1280, 1280), (4096, 4096))
QUICK_TOKENS = (1, 16, 33, 64, 128, 512)
KEY = ("variant", "m", "n", "k")
"""Columns that name a cell."""
SETTLE_US = 100_000.0
SETTLE_TOKENS = 1024
"""From here on layers reach the GPU's power limit: see `qcut.tuning.timing.measure`."""
ROUNDS, MIN_ROUNDS = 15, 3
NOISE, LONG_PROMPT = 0.97, 0.95
FLOAT_TOKENS = ("w8a16", "codebook4")
"""Schemes with products that read 16-bit tokens."""


def to_reach(scheme: str, m: int) -> float:
    """Least speed over float16: not slower, except for noise; 16-bit tokens beyond 1,024 have float16's arithmetic.

    Layers of e4m3 tokens have none.
    """
    if scheme in FLOAT8:
        return 0.0
    return LONG_PROMPT if scheme in FLOAT_TOKENS and m > 1024 else NOISE


def tolerance(scheme: str) -> float:
    """Largest relative error of a whole result against the same weight in float64.

    float16 tokens and results: a few of their roundings. Int8 tokens: 4.5 / 127 / sqrt(12); one range for all tokens
    is wider than each token's own.
    """
    if scheme in FLOAT8:
        return float8.TOLERANCE
    return 2e-3 if scheme in FLOAT_TOKENS else 0.03


def layer_calls(scheme: str, shape: Shape, *, bias: bool = True) -> list[Any]:
    """The calls of a layer on CUDA, for `qcut.backends.cuda.launch.prebuild`."""
    describe = qcut.Linear.subclass_for(scheme).cuda_calls
    m, n, k = shape.m, shape.n, shape.k
    dtype = torch.float16
    return list(describe(parse_scheme(scheme), dtype=dtype, rows=m, n=n, k=k, bias=bias, activation="none"))


def kernels(scheme: str, shape: Shape, device: int, *, bias: bool = True) -> str:
    """Names of the kernels of one call, in the order of their launches."""
    return "+".join(source.name for call in layer_calls(scheme, shape, bias=bias) for source in call.sources(device))


def copies_of(layer: nn.Module) -> list[Any]:
    """A layer and as many copies as together exceed the L2, an even number."""
    nbytes = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    count = harness.rotation(nbytes)
    return [layer, *(copy.deepcopy(layer) for _ in range(count + count % 2 - 1))]


def variant(name: str, layers: Sequence[Any], tokens: tuple[Tensor, Tensor]) -> Variant:
    """Copies of a layer, called with alternating tokens; the first copy is checked against float64."""
    if name == "torch_fp8":
        tokens = (tokens[0].bfloat16(), tokens[1].bfloat16())

    def call(i: int) -> Tensor:
        return layers[i](tokens[i % 2])  # type: ignore[no-any-return]

    def check() -> None:
        layer = layers[0]
        weight = layer.weight if name == BASELINE else layer.dequantized_weight()
        reference = tokens[0].double() @ weight.double().t() + layer.bias.double()
        require_close(call(0), reference, tolerance(name) if name != BASELINE else tolerance("w8a16"))
        for i in range(1, len(layers)):  # a layer's first call allocates, which a capture does not allow
            call(i)

    return Variant(name, call, len(layers), check)


def add_rows(results: harness.Results, shape: Shape, timings: dict[str, Timing], names: dict[str, str]) -> None:
    """One row per scheme, with float16's median; none if float16 was not timed."""
    if BASELINE not in timings:
        return
    fp16_us = timings[BASELINE].median_us
    for scheme, timing in timings.items():
        if scheme != BASELINE:
            columns = {"variant": scheme, "m": shape.m, "n": shape.n, "k": shape.k, "fp16_us": round(fp16_us, 3)}
            ratio = round(fp16_us / timing.median_us, 4)
            results.add(timing, **columns, x_fp16=ratio, to_reach=to_reach(scheme, shape.m), kernel=names[scheme])


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Rows by speed over float16, the least first."""
    return sorted(rows, key=lambda row: float(row["x_fp16"]))


def is_slow(row: Row) -> bool:
    """Whether a cell is below its target."""
    return float(row["x_fp16"]) < float(row["to_reach"])


def summary(rows: Sequence[Row], most: int = 40) -> str:
    """The cells that are too slow, the worst first, and for each scheme how many, its mean and its least."""
    slow = [row for row in worst_first(rows) if is_slow(row)]
    lines = [
        f"{row['variant']} {row['m']}x{row['n']}x{row['k']}: {float(row['x_fp16']):.3f}x "
        f"({float(row['fp16_us']):.2f} / {float(row['median_us']):.2f} us)"
        for row in slow[:most]
    ]
    if len(slow) > most:
        lines.append(f"... and {len(slow) - most} more")
    for scheme in dict.fromkeys(row["variant"] for row in rows):
        own = [float(row["x_fp16"]) for row in rows if row["variant"] == scheme]
        below = sum(row["variant"] == scheme for row in slow)
        mean = harness.geomean(own)
        lines.append(f"{scheme}: {below} of {len(own)} cells too slow, mean {mean:.3f}x, least {min(own):.3f}x")
    return "\n".join([*lines, *float8_faster(rows)])


def float8_faster(rows: Iterable[Row]) -> list[str]:
    """Cells of `FLOAT8_TOKENS` tokens and more in which a layer of e4m3 tokens is faster than ``w8a8``."""
    us: dict[str, dict[str, float]] = {}
    for row in rows:
        if int(row["m"]) >= FLOAT8_TOKENS:
            us.setdefault(row["variant"], {})[f"{row['m']}x{row['n']}x{row['k']}"] = float(row["median_us"])
    lines, int8 = [], us.get("w8a8", {})
    for name in FLOAT8:
        ratios = {cell: int8[cell] / time for cell, time in us.get(name, {}).items() if cell in int8}
        slow = [f"{cell} {ratio:.2f}x" for cell, ratio in ratios.items() if ratio > 1 / NOISE]
        if ratios:
            found = f"{len(slow)} of {len(ratios)} cells from {FLOAT8_TOKENS} tokens on"
            lines.append(f"{name}: faster than w8a8 in {found}: {', '.join(slow) or 'none'}")
    return lines


def least_by_tokens(rows: Iterable[Row]) -> dict[int, dict[str, float]]:
    """Tokens → scheme → the least speed over float16 of any shape."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        of = found.setdefault(int(row["m"]), {})
        of[row["variant"]] = min(of.get(row["variant"], float("inf")), float(row["x_fp16"]))
    return dict(sorted(found.items()))


def plot(rows: Sequence[Row], out: Path, gpu: str) -> None:
    """The least speed of each scheme by tokens."""
    found = least_by_tokens(rows)
    series = {scheme: [of.get(scheme, float("nan")) for of in found.values()] for scheme in SCHEMES}
    title = f"whole layers, the slowest of {len({(row['n'], row['k']) for row in rows})} shapes, on {gpu}"
    plots.ratios(out / "bench_crossover", [str(m) for m in found], series, title, "speed, float16 nn.Linear = 1")


def shape_of(text: str) -> tuple[int, int]:
    """``NxK``."""
    try:
        n, k = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NxK, such as 4096x14336") from None
    return n, k


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="NxK", help="out_features x in_features")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="M")
    parser.add_argument("--float8", action="store_true", help="measure layers of e4m3 tokens next to the schemes")
    parser.add_argument("--build-only", action="store_true", help="build the kernels and measure nothing")


def build(options: argparse.Namespace, device: int) -> None:
    """Build every kernel of the cells, in parallel."""
    from qcut.backends.cuda.launch.prebuild import prebuild

    schemes = [*options.schemes, *FLOAT8[:1] * options.float8]
    cells = [(s, Shape(m, n, k)) for s in schemes for n, k in options.shapes for m in options.tokens]
    start = time.monotonic()
    prebuild([call for scheme, shape in cells for call in layer_calls(scheme, shape)], device)
    print(f"kernels of {len(cells)} cells ready after {time.monotonic() - start:.1f} s", flush=True)


@harness.script(harness.timing_options, add_options, gpu=True, time_budget=150.0)
def main(options: argparse.Namespace) -> int:
    options.shapes = options.shapes or (QUICK_NK if options.quick else NK)
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    torch.manual_seed(0)
    device = torch.cuda.current_device()
    build(options, device)
    if options.build_only:
        return 0
    results = harness.Results("bench_crossover", harness.environment())
    clock = harness.CudaClock()
    start = time.monotonic()
    left = len(options.shapes) * len(options.tokens)
    failures = 0
    for n, k in options.shapes:
        linear = float_layer(n, k)
        sample = torch.randn(256, k, device="cuda")
        made: dict[str, nn.Module] = {scheme: qcut_layer(linear, scheme, sample) for scheme in options.schemes}
        if options.float8:
            made |= dict(zip(FLOAT8, (qcut_layer(linear, FLOAT8[0], sample), float8.TorchFloat8(linear)), strict=True))
        layers = {name: copies_of(layer) for name, layer in {BASELINE: linear, **made}.items()}
        for m in options.tokens:
            shape, now = Shape(m, n, k), time.monotonic()
            share = (start + options.time_budget - now) / left  # spreads time that earlier shapes left
            left -= 1
            x = torch.randn(m, k, device="cuda").half()
            tokens = (x, x.clone())
            variants = [variant(name, of, tokens) for name, of in layers.items()]
            rounds = {"rounds": 5 if options.quick else ROUNDS, "min_rounds": MIN_ROUNDS}
            settle_us = SETTLE_US if m >= SETTLE_TOKENS and not options.quick else 0.0
            timings, wrong = harness.timed(
                shape.name, variants, clock, options, now + share, settle_us=settle_us, **rounds
            )
            failures += wrong
            names = {name: "" if name == FLOAT8[1] else kernels(name, shape, device) for name in made}
            add_rows(results, shape, timings, names)
        results.write_csv(options.out, KEY)
        print(f"{n}x{k}: {time.monotonic() - start:.1f} s", flush=True)
    path = results.write_csv(options.out, KEY)
    rows = harness.read_rows(path)
    plot(rows, options.out, results.env.gpu)
    measured = [{column: str(value) for column, value in row.items()} for row in results.rows]
    print(f"{summary(measured)}\n{failures} wrong results; {len(measured)} of {len(rows)} rows in {path} are new")
    return 1 if failures else 0
