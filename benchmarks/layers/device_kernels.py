"""The kernels of a benchmark: qcut's choices, built ahead in parallel, and those that a call launched."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import Results, Variant
from benchmarks.layers.shapes import Shape
from qcut import jit
from qcut.dispatch import gemm as dispatch
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem

Call = tuple[Epilogue, int, int, int]
"""A GEMM with int8 weights as an operator sees it: epilogue, M, N, K."""


def prebuild(calls: Iterable[Call], a: DType = DType.S8) -> dict[Call, str]:
    """Build, in parallel, the kernels that qcut chooses for these GEMMs on the current GPU.

    Args:
        calls: the GEMMs; weights are int8.
        a: type of the activations; F16 or BF16 takes the weight-only family.

    Returns:
        For each call the procedural name of its kernel.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    from qcut.backends.cuda.gemm import Product, w8a16_spec
    from qcut.backends.cuda.launch.plans import m_bucket, target

    gpu = target(torch.cuda.current_device())
    cutlass = jit.is_toolchain_available("nvcc")
    sources: dict[Call, KernelSource] = {}
    for epilogue, m, n, k in calls:
        alignment_k, alignment_n = map(dispatch.alignment_of, (k, n))
        problem = GemmProblem(a, epilogue=epilogue, alignment_k=alignment_k, alignment_n=alignment_n)
        if a is DType.S8:
            spec = Product(problem, m_bucket(m), n, k).spec(gpu, cutlass=cutlass)
        else:
            spec = w8a16_spec(replace(problem, alignment_k=8 if k % 8 == 0 else 1), m_bucket(m), n, k, gpu)
        sources[epilogue, m, n, k] = spec.source
    for result in jit.build_many(sources.values(), progress=sys.stderr.isatty()).values():
        if isinstance(result, Exception):
            raise result
    return {call: source.name for call, source in sources.items()}


def name_rows(results: Results, shape: Shape, variants: Iterable[Variant]) -> None:
    """Fill the empty kernel columns of a shape's rows, after all timing: the profiler slows calls down."""
    rows = {
        str(row["variant"]): row
        for row in results.rows
        if (row["m"], row["n"], row["k"]) == (shape.m, shape.n, shape.k) and not row["kernel"]
    }
    calls = {v.name: functools.partial(v.call, 0) for v in variants if v.name in rows}
    for name, kernel in kernel_names(calls).items():
        rows[name]["kernel"] = kernel


def kernel_names(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Which device kernels each call launches, in order, joined by ``+``.

    The names come from the profiler. Copies and fills of memory are listed, too.
    """
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for key, call in calls.items():
            with record_function(f"variant:{key}"):
                call()
                torch.cuda.synchronize()
                time.sleep(2e-4)
    events = list(prof.events())
    spans = {
        e.name.removeprefix("variant:"): e.time_range
        for e in events
        if e.name.startswith("variant:") and e.device_type == DeviceType.CPU
    }
    kernels = sorted(
        (e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith("variant:")),
        key=lambda e: e.time_range.start,
    )
    return {
        key: "+".join(e.name[:160] for e in kernels if span.start <= e.time_range.start <= span.end)
        for key, span in spans.items()
    }
