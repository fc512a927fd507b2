"""4-bit integers with zero points, as other libraries quantize, against qcut's own 4-bit integers.

Zero points are stored next to the scales, and the same kernels add them (docs/foreign-checkpoints.md). A row is one
layer at one shape; it also has the time of `int4` with groups of the same size, interleaved in the same call.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks import harness
from benchmarks.layers.crossover import MIN_ROUNDS, ROUNDS, SETTLE_TOKENS, SETTLE_US, copies_of, variant
from benchmarks.layers.shapes import Shape
from qcut.backends.cuda.launch.prebuild import prebuild
from qcut.layers.codebook import CodebookLinear
from qcut.layers.shifted import ShiftedCodebookLinear
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Codebook, ShiftedCodebook

NK = ((4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (1, 2, 8, 16, 32, 64, 128, 512, 4096)
GROUPS = (128, 32)
LEAST = 0.95
"""Of `int4`'s speed, to reach."""


def pair(n: int, k: int, size: int) -> tuple[CodebookLinear, ShiftedCodebookLinear]:
    """The same random integers and scales, without zero points and with them."""
    groups = -(-k // size)
    indices = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    norms = (torch.rand(n, groups, device="cuda") + 0.5).half() / 1024
    offsets = (8 - torch.randint(0, 16, (n, groups), device="cuda")).half()
    book = RotatedCodebook(indices, norms, torch.arange(-8.0, 8.0, device="cuda"), size, "none", 0)
    bias = torch.randn(n, device="cuda")
    own = CodebookLinear.from_passes([book], bias, Codebook(group_size=size, rotation="none", levels="steps"))
    scheme = ShiftedCodebook(group_size=size, levels="steps", shifted=True)
    return own, ShiftedCodebookLinear.from_parts([book], bias, scheme, offsets=offsets, order=None)


def build(m: int, n: int, k: int, device: int) -> None:
    """Build the kernels of both layers, in parallel."""
    calls = []
    for size in GROUPS:
        own = Codebook(group_size=size, rotation="none", levels="steps")
        theirs = ShiftedCodebook(group_size=size, levels="steps", shifted=True)
        sizes = {"dtype": torch.float16, "rows": m, "n": n, "k": k, "bias": True, "activation": "none"}
        calls += [*CodebookLinear.cuda_calls(own, **sizes), *ShiftedCodebookLinear.cuda_calls(theirs, **sizes)]  # type: ignore[arg-type]
    prebuild(calls, device)


@torch.no_grad()
@harness.script(harness.timing_options, gpu=True, time_budget=40.0)
def main(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    shapes, counts = (NK[:1], TOKENS[::4]) if options.quick else (NK, TOKENS)
    device = torch.cuda.current_device()
    for n, k in shapes:
        for m in counts:
            build(m, n, k, device)
    results, clock = harness.Results("bench_foreign", harness.environment()), harness.CudaClock()
    start, left, failures = time.monotonic(), len(shapes) * len(counts) * len(GROUPS), 0
    table = []
    for n, k in shapes:
        for size in GROUPS:
            own, theirs = (copies_of(layer) for layer in pair(n, k, size))
            for m in counts:
                now, shape = time.monotonic(), Shape(m, n, k)
                share = (start + options.time_budget - now) / left
                left -= 1
                x = torch.randn(m, k, device="cuda").half()
                tokens = (x, x.clone())
                names = f"int4_g{size}", f"int4_g{size}_shifted"
                layers = (variant(names[0], own, tokens), variant(names[1], theirs, tokens))
                settle = SETTLE_US if m >= SETTLE_TOKENS and not options.quick else 0.0
                limits = {"rounds": ROUNDS, "min_rounds": MIN_ROUNDS, "settle_us": settle}
                timings, wrong = harness.timed(shape.name, layers, clock, options, now + share, **limits)
                failures += wrong
                if wrong:
                    continue
                mine, timing = (timings[name] for name in names)
                ratio = round(mine.median_us / timing.median_us, 4)
                columns = {"variant": names[1], "m": m, "n": n, "k": k, "int4_us": round(mine.median_us, 3)}
                results.add(timing, **columns, x_int4=ratio, to_reach=LEAST)
                table.append([names[1], shape.name, f"{mine.median_us:.2f}", f"{timing.median_us:.2f}", f"{ratio:.3f}"])
    path = results.write_csv(options.out)
    print(harness.table(["layer", "shape", "int4 us", "us", "speed"], table))
    ratios = [float(row[-1]) for row in table]
    print(f"mean {harness.geomean(ratios):.3f}, least {min(ratios):.3f}; {failures} wrong results; rows in {path}")
    return 1 if failures else 0
