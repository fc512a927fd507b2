"""Times of whole layers in every scheme on one and on 16 tokens, next to float16, and the bytes that they keep.

python benchmarks layers schemes
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Results, Variant
from benchmarks.layers.codebook import NK, calls, copies_of, float_layer, reference_of
from benchmarks.layers.gemm import require_close
from qcut.models.modules import tensor_key

SCHEMES = (
    *("w8a8", "int16x8", "w8a16", "fp8", "fp8_blocks", "fp8_dynamic"),
    *("codebook4", "codebook4+4", "codebook3", "codebook2", "int4", "mxfp4", "nvfp4"),
)
TOKENS = (1, 16)


def tensor_bytes(layers: Iterable[nn.Module]) -> int:
    """Bytes that layers keep, with their biases; a shared tensor counts once."""
    tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    return sum({tensor_key(t): t.nbytes for t in tensors}.values())


def measure(options: argparse.Namespace, results: Results) -> int:
    """Time whole layers on few tokens, float16 and every scheme, and return the number of wrong results."""
    torch.manual_seed(0)
    clock, failures = harness.CudaClock(), 0
    layers: dict[str, nn.ModuleList] = {}
    for scheme in options.schemes:
        say(f"{scheme}: kernels of {len(NK)} shapes")
        layers[scheme] = nn.ModuleList(float_layer(n, k) for n, k in NK)
        bar = sys.stderr.isatty()
        qcut.quantize(layers[scheme], scheme, skip=(), allow_growth=True, prebuild=TOKENS, progress=bar)
    deadline = time.monotonic() + options.time_budget
    for i, (n, k) in enumerate(NK):
        floats = copies_of(float_layer(n, k), 2.0 * n * k)
        several = {scheme: copies_of(made[i], tensor_bytes([made[i]])) for scheme, made in layers.items()}
        for m in TOKENS:
            if time.monotonic() > deadline:
                say(f"out of time before {m} x {n} x {k}")
                return failures
            x = torch.randn(m, k, device=floats[0].weight.device).half()
            variants = [Variant("float", calls(floats, x), len(floats))]
            for scheme, copies in several.items():
                call = calls(copies, x)
                wanted = reference_of(copies[0], x) + copies[0].bias.double()
                limit = 0.03 if scheme == "w8a8" else 2e-3
                variants.append(Variant(scheme, call, len(copies), functools.partial(_check, call, wanted, limit)))
            timings, wrong = harness.timed(f"{m} x {n} x {k}", variants, clock, options, deadline)
            failures += wrong
            for name, timing in timings.items():
                nbytes = tensor_bytes([floats[0] if name == "float" else several[name][0]])
                x_float = round(timings["float"].median_us / timing.median_us, 4)
                results.add(timing, m=m, n=n, k=k, variant=name, weight_bytes=nbytes, x_float=x_float)
            results.write_csv(options.out)
            say(f"{m} x {n} x {k}: " + ", ".join(f"{name} {t.median_us:.2f}" for name, t in timings.items()))
    return failures


def _check(call: Callable[[int], Tensor], wanted: Tensor, limit: float) -> None:
    require_close(call(0), wanted, limit)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schemes", type=harness.list_of(SCHEMES), default=",".join(SCHEMES), help="comma-separated [all]"
    )


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Measure; 1 if a layer was wrong."""
    results = Results("report_layers", harness.environment())
    failures = measure(options, results)
    columns = ("m", "n", "k", "variant", "median_us", "x_float", "weight_bytes")
    print(harness.table(columns, [[row[column] for column in columns] for row in results.rows]))
    print(f"{failures} wrong; rows in {options.out}")
    return 1 if failures else 0
