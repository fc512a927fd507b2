"""The kernels of layers, built before a layer is called."""

from __future__ import annotations

import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from qcut import jit
from qcut.cuda import native
from qcut.emitters.core.source import KernelSource


class LayerCall(Protocol):
    """A call of a layer at one number of rows: all that chooses its kernels."""

    def sources(self, device: int) -> list[KernelSource]:
        """The kernels that the call launches on a device."""

    @property
    def calls_native(self) -> bool:
        """Whether `qcut.cuda.native`, in C++, serves the call."""


def prebuild(calls: Collection[LayerCall], device: int, progress: bool = True) -> None:
    """Build the kernels of calls, in parallel, and the C++ operators where they serve a call.

    Kernels in the cache are not built again.

    Args:
        calls: calls of layers, each at one number of rows.
        device: CUDA ordinal.
        progress: show a progress bar, if a terminal is there.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    sources = {source.name: source for call in calls for source in call.sources(device)}
    with ThreadPoolExecutor(1, thread_name_prefix="qcut-build") as pool:
        operators = pool.submit(native.build) if any(call.calls_native for call in calls) else None
        results = jit.build_many(sources.values(), progress=progress and sys.stderr.isatty())
    if operators is not None:
        operators.result()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
