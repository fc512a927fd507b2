"""Layers of qcut's schemes next to those of other libraries and float16: the same weights, interleaved, on one GPU.

Layers have no bias, which some libraries would add by another kernel. They read float16 tokens, or bfloat16 where a
library has no others; quantizing tokens counts. Libraries that are not installed are named and left out. A row is one
method at one shape: with its time and float16's of the same run, or with the reason why it has none.

What compiles or tunes at a first call is prepared first, in processes of its own, while qcut's kernels are built.
``bench_peers.csv`` in ``--out`` keeps the rows of cells that a call does not measure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import CheckError, Clock, Timing, Variant
from benchmarks.layers import crossover, libraries
from benchmarks.layers.codebook import float_layer, weight_bytes
from benchmarks.layers.gemm import require_close
from benchmarks.layers.libraries import PEERS, Layer
from benchmarks.layers.linear import qcut_layer
from benchmarks.layers.shapes import Shape
from benchmarks.publish.rows import Row

BENCH = "bench_peers"
BASELINE = "fp16"
OURS = "qcut_"
SCHEMES = ("w8a8", "w8a16", "int4", "codebook4", "codebook4_int8", "fp8_dynamic")
METHODS = (*(OURS + scheme for scheme in SCHEMES if scheme != "int4"), *PEERS)
NK = ((14336, 4096), (4096, 14336), (4096, 4096), (5120, 1280))
"""The headline's first: a short budget measures it."""
TOKENS = (1, 8, 16, 64, 128, 512, 1024, 4096)
QUICK_NK, QUICK_TOKENS = ((4096, 4096),), (1, 16, 1024)
KEY = ("variant", "m", "n", "k")
SLOW = "a first call took more than"
MOST_COPIES = 64
"""Of a small layer of another library: building them is slow, and so many exceed the L2."""


class TooLong(Exception):
    """A call took longer than it may."""


@dataclass(frozen=True)
class Method:
    """A method's layers of one size.

    Attributes:
        name: of the method.
        version: of its library.
        dtype: of tokens and results.
        layers: equal ones that together exceed the L2, an even number.
        weight: returns ``[N, K]``; a result is near its product with the tokens.
        tolerance: largest relative error of a result, in float64.
        moved: bytes of the weight.
        product_bits: of the operands of the tensor cores.
    """

    name: str
    version: str
    dtype: torch.dtype
    layers: Sequence[Layer]
    weight: Callable[[], Tensor]
    tolerance: float
    moved: float
    product_bits: int

    def variant(self, x: Tensor) -> Variant:
        """Calls that read two copies of the tokens in turns, since qcut's layers share the rotation of one tensor."""
        tokens = (x.to(self.dtype), x.to(self.dtype, copy=True))

        def call(i: int) -> Tensor:
            return self.layers[i](tokens[i % 2])

        def check() -> None:
            require_close(call(0), tokens[0].double() @ self.weight().double().t(), self.tolerance)
            for i in range(1, len(self.layers)):  # a layer's first call allocates, which a capture does not allow
                call(i)

        return Variant(self.name, call, len(self.layers), check)


def own_method(linear: nn.Linear, name: str) -> Method:
    """float16's, or one of qcut's schemes."""
    n, k = linear.weight.shape
    if name == BASELINE:
        layers = crossover.copies_of(linear)
        half = crossover.tolerance("w8a16")
        return Method(name, torch.__version__, torch.float16, layers, lambda: linear.weight, half, 2.0 * n * k, 16)
    scheme = name.removeprefix(OURS)
    layer: Any = qcut_layer(linear, scheme, linear.weight[:1])
    bits = 8 if scheme in ("w8a8", "codebook4_int8", "fp8_dynamic") else 16
    limit, moved = crossover.tolerance(scheme), weight_bytes(scheme, n, k)
    layers = crossover.copies_of(layer)
    return Method(name, qcut.__version__, torch.float16, layers, layer.dequantized_weight, limit, moved, bits)


def peer_method(linear: nn.Linear, name: str) -> Method:
    """A method of another library."""
    n, k = linear.weight.shape
    peer = PEERS[name]
    moved = n * k * peer.kind.bits / 8
    count = min(harness.rotation(int(moved)), MOST_COPIES)
    layers = [peer.build(linear) for _ in range(count + count % 2)]
    decoded = peer.weight
    weight: Callable[[], Tensor] = (lambda: linear.weight) if decoded is None else (lambda: decoded(layers[0]))
    limits = (peer.kind.tolerance, moved, peer.kind.product_bits)
    return Method(name, peer.version(), peer.dtype, layers, weight, *limits)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in the body, on the main thread, once it has taken this long."""

    def raise_error(_: int, __: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason_of(name: str, work: Callable[[], object], seconds: float) -> str:
    """Run a method's work and return why it failed, in a line; "" if it did not.

    Other libraries fail with exceptions of any type, and hide that of `limited`.

    Raises:
        CheckError: the device itself has failed, and would fail all later calls.
    """
    start = time.monotonic()
    try:
        with limited(seconds):
            work()
    except Exception as error:
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError:
            raise CheckError(f"{name} broke the device: {error}; leave it out by --methods") from error
        if time.monotonic() - start >= seconds:
            return f"{SLOW} {seconds:.0f} s"
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


def methods_of(linear: nn.Linear, names: Iterable[str], seconds: float) -> tuple[list[Method], dict[str, str]]:
    """The methods that can be built for a layer, float16 first, and why others cannot."""
    found: list[Method] = []
    reasons: dict[str, str] = {}
    for name in (BASELINE, *names):
        make = peer_method if name in PEERS else own_method
        if reason := reason_of(name, lambda make=make, name=name: found.append(make(linear, name)), seconds):  # type: ignore[misc]
            reasons[name] = reason
    return found, reasons


def measured(
    shape: Shape, methods: Sequence[Method], clock: Clock, seconds: float, **more: Any
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Check the methods on random tokens and time those that are right.

    Args:
        shape: of the tokens and the methods' layers.
        methods: to measure.
        clock: that times them.
        seconds: most for a method's first calls.
        more: for `qcut.tuning.timing.measure`.

    Returns:
        Timings by name, and why the other methods have none.
    """
    x = torch.randn(shape.m, shape.k, device="cuda" if torch.cuda.is_available() else "cpu").half()
    reasons: dict[str, str] = {}
    good = []
    for method in methods:
        variant = method.variant(x)
        assert variant.check is not None
        if reason := reason_of(method.name, variant.check, seconds):
            reasons[method.name] = reason
        else:
            good.append(variant)
    return harness.measure(good, clock, report=functools.partial(print, f"{shape.name}:", flush=True), **more), reasons


def add_rows(
    results: harness.Results,
    shape: Shape,
    methods: Mapping[str, Method],
    timings: Mapping[str, Timing],
    reasons: Mapping[str, str],
    kernels: Mapping[str, str],
) -> None:
    """A row for each method that was timed, with float16's time and the kernels if known, and one for each reason."""
    fp16 = timings[BASELINE].median_us if BASELINE in timings else math.nan
    for name in (*timings, *reasons):
        method = methods.get(name)
        version = method.version if method else PEERS[name].version() if name in PEERS else qcut.__version__
        columns: dict[str, object] = {"version": version, "reason": reasons.get(name, "")}
        if method and name in timings:
            columns |= {"dtype": str(method.dtype).removeprefix("torch."), "kernel": kernels.get(name, "")}
            columns |= {"fp16_us": round(fp16, 3), "x_fp16": round(fp16 / timings[name].median_us, 4)}
            moved = method.moved + shape.bytes_moved(16, 0, 16)
            results.add_gemm(timings[name], shape, name, moved, method.product_bits, **columns)
        else:
            size = {"m": shape.m, "n": shape.n, "k": shape.k}
            results.rows.append({"bench": results.bench, **size, "variant": name, **columns})


def prepare(options: argparse.Namespace, folder: str) -> list[Future[None]]:
    """Start processes that compile and tune; what they make stays in the libraries' caches.

    Args:
        options: of the command line.
        folder: gets gemlite's tiles.
    """
    deadline = time.monotonic() + options.prepare
    settings = os.environ | {libraries.TUNED: folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def run(name: str, n: int, k: int) -> None:
        tokens = (str(m) for m in options.tokens)
        arguments = ("--build-only", "--methods", name, "--shapes", f"{n}x{k}", "--tokens", *tokens)
        left = max(deadline - time.monotonic(), 0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what is not ready then is tried in the run itself
            subprocess.run(harness.command(__name__, *arguments), env=settings, timeout=left, capture_output=True)

    names = sorted(name for name in options.methods if name in PEERS and PEERS[name].prepares)
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1))
    futures = [pool.submit(run, name, n, k) for n, k in options.shapes for name in names]
    pool.shutdown(wait=False)
    return futures


def build(options: argparse.Namespace) -> None:
    """Call each method once for each size and number of tokens, so that nothing is left to compile or tune."""
    prebuild_own(options)
    for n, k in options.shapes:
        linear = float_layer(n, k, bias=False)
        for name in (name for name in options.methods if name in PEERS):
            peer = PEERS[name]
            layer = peer.build(linear)
            for m in options.tokens:
                x = torch.randn(m, k, device="cuda").to(peer.dtype)
                reason = reason_of(name, functools.partial(layer, x), options.prepare)
                print(f"{name} {m}x{n}x{k}: {reason or 'ready'}")
                if peer.package == "gemlite":
                    libraries.keep_tiles(f"{name}-{n}x{k}")


def prebuild_own(options: argparse.Namespace) -> None:
    """Build qcut's kernels of all cells, in parallel."""
    from qcut.backends.cuda.launch.prebuild import prebuild

    schemes = [name.removeprefix(OURS) for name in options.methods if name.startswith(OURS)]
    cells = [(scheme, Shape(m, n, k)) for scheme in schemes for n, k in options.shapes for m in options.tokens]
    calls = [call for scheme, shape in cells for call in crossover.layer_calls(scheme, shape, bias=False)]
    prebuild(calls, torch.cuda.current_device())


def summary(rows: Iterable[Row]) -> str:
    """Microseconds by method and tokens, a table for each size; the fastest of qcut's and of the others in a line."""
    sizes: dict[tuple[int, int], dict[str, dict[int, float]]] = {}
    for row in rows:
        if row.get("median_us"):
            of = sizes.setdefault((int(row["n"]), int(row["k"])), {})
            of.setdefault(row["variant"], {})[int(row["m"])] = float(row["median_us"])
    texts = []
    for (n, k), methods in sizes.items():
        tokens = sorted({m for times in methods.values() for m in times})
        lines = [[name, *(times.get(m, math.nan) for m in tokens)] for name, times in methods.items()]
        texts += [f"{n}x{k}, µs", harness.table(["", *map(str, tokens)], lines)]
        for m in tokens:
            at = {name: times[m] for name, times in methods.items() if m in times}
            ours = fastest({name: us for name, us in at.items() if name.startswith(OURS)})
            theirs = fastest({name: us for name, us in at.items() if name in PEERS})
            if ours and theirs:
                ratio = theirs[1] / ours[1]
                texts.append(f"{m} tokens: {ours[0]} {ours[1]:.1f}, {theirs[0]} {theirs[1]:.1f}: {ratio:.2f}x")
    return "\n".join(texts)


def fastest(times: Mapping[str, float]) -> tuple[str, float] | None:
    """Name and microseconds of the fastest; None of none."""
    return min(times.items(), key=lambda item: item[1]) if times else None


def add_options(parser: argparse.ArgumentParser) -> None:
    own = tuple(OURS + scheme for scheme in SCHEMES)
    parser.add_argument("--methods", nargs="+", choices=(*own, *PEERS), default=list(METHODS), metavar="METHOD")
    parser.add_argument(
        "--shapes", nargs="+", type=crossover.shape_of, metavar="NxK", help="out_features x in_features"
    )
    parser.add_argument("--tokens", nargs="+", type=int, metavar="M")
    parser.add_argument(
        "--prepare", type=float, default=180.0, metavar="SECONDS", help="most for compiling and tuning [180]; 0: none"
    )
    parser.add_argument(
        "--first-call", type=float, default=30.0, metavar="SECONDS", help="leave out a method that takes longer [30]"
    )
    parser.add_argument("--build-only", action="store_true", help="compile and tune, and measure nothing")


@harness.script(harness.timing_options, add_options, gpu=True, time_budget=150.0)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result of qcut's or float16's was wrong, 2 without a GPU."""
    options.shapes = options.shapes or (QUICK_NK if options.quick else NK)
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    missing = [name for name in options.methods if name in PEERS and not PEERS[name].is_installed()]
    for package in dict.fromkeys(PEERS[name].package for name in missing):
        names = ", ".join(name for name in missing if PEERS[name].package == package)
        print(f"{package} is not installed: {names} left out", flush=True)
    options.methods = [name for name in options.methods if name not in missing]
    torch.manual_seed(0)
    if options.build_only:
        build(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        preparing = prepare(options, folder) if options.prepare > 0 else []
        prebuild_own(options)
        for future in preparing:
            future.result()
        os.environ[libraries.TUNED] = folder
        print(f"kernels ready after {time.monotonic() - started:.0f} s", flush=True)
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Time all cells and write the rows after each."""
    results = harness.Results(BENCH, harness.environment())
    clock = harness.CudaClock()
    start = time.monotonic()
    left, failures = len(options.shapes) * len(options.tokens), 0
    path = Path()
    for n, k in options.shapes:
        linear = float_layer(n, k, bias=False)
        methods, unbuilt = methods_of(linear, options.methods, 2 * options.first_call)
        for m in options.tokens:
            shape, now = Shape(m, n, k), time.monotonic()
            share = (start + options.time_budget - now) / left  # spreads time that earlier cells left
            left -= 1
            if share <= 0:
                continue
            rounds = {"rounds": 7 if options.quick else crossover.ROUNDS, "min_rounds": crossover.MIN_ROUNDS}
            settle_us = crossover.SETTLE_US if m >= crossover.SETTLE_TOKENS and not options.quick else 0.0
            limits = {"deadline": now + share, "settle_us": settle_us, **rounds}
            timings, reasons = measured(shape, methods, clock, options.first_call, **limits)
            reasons |= unbuilt
            for name, reason in reasons.items():
                print(f"{shape.name}: {name}: {reason}", flush=True)
                failures += name not in PEERS
            slow = {name for name, reason in reasons.items() if reason.startswith(SLOW)}
            kernels = {
                name: crossover.kernels(name.removeprefix(OURS), shape, torch.cuda.current_device(), bias=False)
                for name in timings
                if name.startswith(OURS)
            }
            add_rows(results, shape, {method.name: method for method in methods}, timings, reasons, kernels)
            unbuilt |= {name: reasons[name] for name in slow}
            methods = [method for method in methods if method.name not in slow]
            path = results.write_csv(options.out, KEY)  # each time: another library may end the process
        del methods, linear
        torch.cuda.empty_cache()
        print(f"{n}x{k}: {time.monotonic() - start:.0f} s", flush=True)
    print(summary([{column: str(value) for column, value in row.items()} for row in results.rows]))
    print(f"{failures} wrong results; rows in {path}")
    return 1 if failures else 0
