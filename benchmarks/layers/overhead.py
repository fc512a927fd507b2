"""CPU cost of one ``torch.ops.qcut.w8a8_linear`` call on the hot path, in C++ and in Python, and the cost of its parts.

Calls of whole codebook layers follow: from C++, from C++ without launches, from Python. A part's cost is the difference
between the whole call and the call without this part, so that the costs add up. The host's clock measures a batch of
calls, which the GPU finishes later.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Timing, cpu_us
from benchmarks.layers import device_kernels
from benchmarks.layers.linear import EPILOGUES
from qcut import jit
from qcut.backends.cuda.launch import native as _native
from qcut.backends.cuda.launch.plans import forget_plans
from qcut.layers import int8 as layers
from qcut.ops.linear import W8A8LinearOp

LIMIT_US = 15.0
OP = "torch.ops.qcut.w8a8_linear"
M, N, K = 16, 1280, 1280
"""Small enough that the GPU keeps up, large enough for the kernels of a real layer."""
CODEBOOKS = ("codebook4", "codebook4_int8", "codebook4_pairs_int8", "codebook4_qr_int8")


@contextmanager
def without_launches() -> Iterator[list[Any]]:
    """Replace launches in the context by a list that collects the kernels."""
    seen: list[Any] = []

    def launch(kernel: jit.Kernel, *_: Any) -> None:
        if kernel not in seen:
            seen.append(kernel)

    with mock.patch.object(jit.Kernel, "launch", launch):
        yield seen


@contextmanager
def without_driver(launched: list[Any]) -> Iterator[None]:
    """Pack arguments in the context without calling the foreign function that launches."""
    calls = [kernel._call for kernel in launched]
    try:
        for kernel in launched:
            kernel._call = lambda *_: 0
        yield
    finally:
        for kernel, call in zip(launched, calls, strict=True):
            kernel._call = call


@contextmanager
def without_native_launches(
    library: _native.Library, entries: list[tuple[_native.Key, _native.Plan]]
) -> Iterator[None]:
    """Make C++ pack the arguments of these plans in the context without launching."""
    try:
        for key, plan in entries:
            idle = _native.Plan.from_buffer_copy(plan)
            for launch in idle.launches:
                launch.host = library.skip_launch
            library.insert(key, idle)
        yield
    finally:
        for key, plan in entries:
            library.insert(key, plan)


@contextmanager
def served_by_python(library: _native.Library) -> Iterator[None]:
    """Have C++ leave all calls in the context to Python."""
    library.leave_to_python(1)
    try:
        yield
    finally:
        library.leave_to_python(0)


def with_entries(call: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[_native.Key, _native.Plan]]]:
    """A call's result, and the plans that it hands to C++."""
    forget_plans()
    with mock.patch.object(_native.Library, "insert", autospec=True, side_effect=_native.Library.insert) as insert:
        result = call()
    return result, [call.args[1:] for call in insert.call_args_list]


def measure_parts(rounds: int) -> tuple[dict[str, Timing], dict[str, float]]:
    """The measured variants, and the parts of a call in microseconds."""
    from qcut.backends.cuda.linear import w8a8_linear

    layer = layers.W8A8Linear.from_float(nn.Linear(K, N, dtype=torch.float16, device="cuda"))
    x = torch.randn(M, K, device="cuda").half()
    args = (x, layer.qweight, layer.weight_scale, layer.bias, "none")
    op = torch.ops.qcut.w8a8_linear.early_read

    def python(*args: Any) -> Tensor:
        return w8a8_linear(W8A8LinearOp(*args, True))  # type: ignore[call-arg]

    library = _native.library()
    expected, entries = with_entries(lambda: op(*args))
    hits = 0 if library is None else library.hits
    if not torch.equal(expected, op(*args)) or not torch.equal(expected, python(*args)):
        raise harness.CheckError("two calls of w8a8_linear do not agree")
    if not torch.equal(expected.cpu(), copy.deepcopy(layer).cpu()(x.cpu())):
        raise harness.CheckError("w8a8_linear does not agree with the CPU reference")
    if library is not None and library.hits == hits:
        raise harness.CheckError("Python served a call that C++ should")

    def allocate() -> None:
        torch.empty((M, N), dtype=torch.float16, device=x.device)
        torch.empty(M * (K + 4), dtype=torch.uint8, device=x.device)

    def timed(call: Any) -> Timing:
        return cpu_us(call, rounds=rounds)

    timings = {
        "qcut.Linear": timed(lambda: layer(x)),
        OP: timed(lambda: op(*args)),
        "Python's function": timed(lambda: python(*args)),
        "Python's allocations": timed(allocate),
    }
    with without_launches() as launched:
        timings["Python without launches"] = timed(lambda: python(*args))
    with without_driver(launched):
        timings["Python without the driver"] = timed(lambda: python(*args))
    if library is not None:
        with without_native_launches(library, entries):
            timings["C++ without launches"] = timed(lambda: op(*args))
    us = {name: timing.median_us for name, timing in timings.items()}
    parts = {"nn.Module call": us["qcut.Linear"] - us[OP]}
    if library is not None:
        parts |= {
            "C++: dispatcher, look-up, two allocations, packing": us["C++ without launches"],
            f"C++: {len(launched)} driver launches": us[OP] - us["C++ without launches"],
        }
    else:
        parts["dispatcher and Python registration"] = us[OP] - us["Python's function"]
    return timings, parts | {
        "Python: two allocations": us["Python's allocations"],
        "Python: checks, plan look-up, addresses": us["Python without launches"] - us["Python's allocations"],
        f"Python: packing {len(launched)} argument blocks": us["Python without the driver"]
        - us["Python without launches"],
        f"Python: {len(launched)} driver launches": us["Python's function"] - us["Python without the driver"],
    }


def measure_codebooks(rounds: int) -> dict[str, Timing]:
    """Calls of codebook layers that rotate their tokens themselves, by scheme and by who serves them."""
    library = _native.library()
    timings: dict[str, Timing] = {}
    for scheme in CODEBOOKS:
        layer = qcut.Linear.from_float(nn.Linear(K, N, dtype=torch.float16, device="cuda"), scheme)
        x = torch.randn(M, K, device="cuda").half()  # layers with the same rotation share the rotated tokens

        def call(layer: qcut.Linear = layer, x: Tensor = x) -> Tensor:
            return layer(x)

        expected, entries = with_entries(call)
        hits = 0 if library is None else library.hits
        if not torch.equal(expected, call()):
            raise harness.CheckError(f"two calls of {scheme} do not agree")
        if library is None:
            timings[f"{scheme} from Python"] = cpu_us(call, rounds=rounds)
            continue
        if library.hits != hits + 2:
            raise harness.CheckError(f"Python served a call of {scheme} that C++ should")
        timings[scheme] = cpu_us(call, rounds=rounds)
        with without_native_launches(library, entries):
            timings[f"{scheme} without launches"] = cpu_us(call, rounds=rounds)
        with served_by_python(library):
            timings[f"{scheme} from Python"] = cpu_us(call, rounds=rounds)
    return timings


@harness.script(harness.timing_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if the call takes longer than it may, 2 without a GPU."""
    device_kernels.prebuild([(EPILOGUES["w8a8"], M, N, K)])
    rounds = 10 if options.quick else 25
    timings, parts = measure_parts(rounds)
    total = timings[OP]
    timings |= measure_codebooks(rounds)
    results = harness.Results("bench_overhead", harness.environment())
    for name, timing in timings.items():
        results.add(timing, variant=name, m=M, n=N, k=K)
    for name, us in parts.items():
        results.add(Timing(us, us, us, 0, "difference"), variant=f"part: {name}", m=M, n=N, k=K)
    path = results.write_csv(options.out)
    print(
        harness.table(
            ["measured", "µs", "p20", "p80"], [(n, t.median_us, t.p20_us, t.p80_us) for n, t in timings.items()]
        )
    )
    print(harness.table(["part of one call", "µs"], list(parts.items())))
    if (problem := _native.problem()) is not None:
        print(f"no C++ operators: {problem}")
    verdict = "reached" if total.median_us < LIMIT_US else "NOT reached"
    print(f"rows in {path}\nCPU time of one call: {total.median_us:.1f} µs (to reach < {LIMIT_US:.0f}): {verdict}")
    return 0 if total.median_us < LIMIT_US else 1
