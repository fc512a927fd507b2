"""Builds the kernels of layers before their first call."""

from __future__ import annotations

import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from qcut import jit
from qcut.cuda import codebook, linear, native
from qcut.cuda.codebook import CodebookLayer
from qcut.cuda.linear import LinearLayer
from qcut.emitters.core.source import KernelSource


def prebuild(layers: Collection[LinearLayer | CodebookLayer], device: int, progress: bool = True) -> None:
    """Build the kernels that calls of layers launch, in parallel, and the C++ operators where layers use them.

    Kernels in the cache are not built again.

    Args:
        layers: layers, each with a number of rows.
        device: CUDA ordinal.
        progress: show a progress bar, if a terminal is there.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    sources: dict[str, KernelSource] = {}
    for layer in layers:
        wanted = codebook.sources(layer, device) if isinstance(layer, CodebookLayer) else linear.sources(layer, device)
        sources |= {source.name: source for source in wanted}
    with ThreadPoolExecutor(1, thread_name_prefix="qcut-build") as pool:
        if any(isinstance(layer, LinearLayer) for layer in layers):
            pool.submit(native.build)
        results = jit.build_many(sources.values(), progress=progress and sys.stderr.isatty())
    for result in results.values():
        if isinstance(result, Exception):
            raise result
