"""The kernels of layers, built before a layer is called."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from qcut import jit
from qcut.cuda import linear, native
from qcut.cuda.linear import LinearLayer
from qcut.emitters.core.source import KernelSource


def prebuild(layers: Iterable[LinearLayer], device: int, progress: bool = True) -> None:
    """Build, in parallel, what calls of these layers launch, and the C++ code of the calls, where not in the cache.

    Args:
        layers: each at one number of rows.
        device: CUDA ordinal.
        progress: show a progress bar, if a terminal is there.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    sources: dict[str, KernelSource] = {
        source.name: source for layer in layers for source in linear.sources(layer, device)
    }
    with ThreadPoolExecutor(1, thread_name_prefix="qcut-build") as pool:
        pool.submit(native.build)
        results = jit.build_many(sources.values(), progress=progress and sys.stderr.isatty())
    for result in results.values():
        if isinstance(result, Exception):
            raise result
