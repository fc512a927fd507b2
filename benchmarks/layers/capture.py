"""A CUDA graph captured at a layer's first call, against one captured when every kernel has been built.

A process of its own, with an empty kernel cache, quantizes layers and captures each at once, without a call before. It
then waits for the background builds, captures each layer again, and times both graphs in turns. Both graphs must give
the same bits. ``--mode fallback`` shows the cost of graphs that keep fallback kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Clock, Timing
from benchmarks.layers.linear import qcut_layer

SCHEMES = ("w8a8", "w8a8_static", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook3", "codebook2")
ROWS = (1, 64, 512)
N = K = 4096
CALLS = 20
"""Calls in a graph."""
ROUNDS = 15
MOST = 1.03
"""Most time of the early graph, as a multiple of the late one's."""
KEY = ("scheme", "path", "m", "build")


def compare(layer: Callable[[Tensor], Tensor], x: Tensor, clock: Clock, path: str) -> Callable[[], dict[str, object]]:
    """Capture a layer now, and once more when the result is called.

    Args:
        layer: maps tokens to a result, on the GPU.
        x: tokens.
        clock: captures and times.
        path: execution path.

    Returns:
        A function that captures the layer again and times both graphs: seconds of the early capture, samples of both in
        µs a call, and whether both gave the same bits.
    """
    results: dict[str, Tensor] = {}

    def capture(name: str) -> Callable[[], object]:
        def body() -> None:
            with qcut.execution_path(path):
                for _ in range(CALLS):
                    results[name] = layer(x)

        return clock.capture(body)

    start = time.perf_counter()
    early = capture("early")
    capture_s = time.perf_counter() - start

    def late() -> dict[str, object]:
        with qcut.execution_path(path):
            layer(x)
        replays = {"early": early, "late": capture("late")}
        for replay in replays.values():
            clock.warm_up(replay)
        same = torch.equal(results["early"], results["late"])
        samples: dict[str, list[float]] = {name: [] for name in replays}
        for i in range(ROUNDS):
            for name in ("early", "late") if i % 2 else ("late", "early"):
                samples[name].append(clock.time_us(replays[name]) / CALLS)
        return {"capture_s": round(capture_s, 3), "same": same, **samples}

    return late


def measured(schemes: list[str], path: str, rows: list[int]) -> list[dict[str, object]]:
    """`compare` of every scheme and number of tokens, in this process."""
    torch.manual_seed(0)
    clock = harness.CudaClock()
    pending = []
    for scheme in schemes:
        linear = nn.Linear(K, N, dtype=torch.float16, device="cuda")
        layer = qcut_layer(linear, scheme, torch.randn(64, K, device="cuda").half())
        for m in rows:
            x = torch.randn(m, K, device="cuda").half()
            pending.append(({"scheme": scheme, "path": path, "m": m}, compare(layer, x, clock, path)))
            print(f"{scheme} {path} m={m}: captured", file=sys.stderr, flush=True)
    qcut.wait_for_kernels()
    return [{**labels, **late()} for labels, late in pending]


def in_a_process(options: argparse.Namespace) -> list[dict[str, object]]:
    """`measured` in a new process with empty caches."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        command = harness.command(__name__, "--child", "--path", options.path)
        command += ["--schemes", *options.schemes, "--rows", *map(str, options.rows)]
        surroundings = {"QCUT_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton", "QCUT_BUILD": options.mode}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | surroundings, check=True)
    found: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES])
    parser.add_argument("--rows", nargs="+", type=int, default=[*ROWS], help="numbers of tokens")
    parser.add_argument("--path", choices=("fused", "portable"), default="fused")
    parser.add_argument("--mode", choices=("background", "fallback"), default="background", help="QCUT_BUILD")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an early graph is slower or gives other bits, 2 without a GPU."""
    if options.child:
        print(json.dumps(measured(options.schemes, options.path, options.rows)))
        return 0
    return report(options, in_a_process(options))


def report(options: argparse.Namespace, found: list[dict[str, object]]) -> int:
    """Write the rows of `measured`, print a table, and return 1 if an early graph misses `MOST` or is wrong."""
    results, rows, misses = harness.Results("bench_capture", harness.environment()), [], 0
    for case in found:
        early, late = (Timing.of(case.pop(name), "graph") for name in ("early", "late"))  # type: ignore[arg-type]
        ratio = round(early.median_us / late.median_us, 3)
        misses += ratio > MOST or not case["same"]
        results.add(early, **case, build=options.mode, late_us=round(late.median_us, 3), x_late=ratio)
        rows.append([*case.values(), early.median_us, late.median_us, ratio])
    path = results.write_csv(options.out, KEY)
    print(harness.table(["scheme", "path", "m", "capture_s", "same", "early_us", "late_us", "x_late"], rows))
    print(
        f"{misses} of {len(rows)} early graphs are over {MOST} times the late ones, or give other bits; rows in {path}"
    )
    return 1 if misses else 0
