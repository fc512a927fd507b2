"""Rehearsals: work that notes the kernels which it lacks instead of waiting for each: they are built together."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from qcut import jit
from qcut.emitters.core.source import KernelSource

T = TypeVar("T")


class MissingKernel(jit.Kernel):
    """Stands in for a kernel that has yet to be built; a launch does nothing."""

    def __init__(self, source: KernelSource, device: int) -> None:
        self.name, self.device, self.resources = source.name, device, None
        self.block, self.smem_bytes = source.block, source.smem_bytes

    @property
    def host_launcher(self) -> int:
        """0: nothing is launched."""
        return 0

    def launch(self, grid: tuple[int, int, int], args: Sequence[int | float], stream: int, pdl: bool = False) -> None:
        """Do nothing."""

    def query(self, what: int, args: Sequence[int | float] | None = None) -> int:
        """0 to every question."""
        return 0


class _Thread(threading.local):
    """Of each thread: the missing kernels by name while it rehearses, and how often one was wanted."""

    missing: dict[str, KernelSource] | None = None
    wanted = 0


_thread = _Thread()


@contextmanager
def rehearsal() -> Iterator[dict[str, KernelSource]]:
    """Launch no kernel that would have to be built first, in this thread, and note its source by its name.

    Plans made of missing kernels are not kept (`wanted` tells). What the work computes is right if nothing is missing.
    """
    outer, _thread.missing = _thread.missing, {}
    try:
        yield _thread.missing
    finally:
        _thread.missing = outer


def missing_kernel(source: KernelSource, device: int) -> MissingKernel | None:
    """A kernel's stand-in in a rehearsal that lacks the kernel; else None."""
    if _thread.missing is None or jit.find(source) is not None:
        return None
    _thread.missing[source.name] = source
    _thread.wanted += 1
    return MissingKernel(source, device)


def wanted() -> int:
    """How often rehearsals of this thread wanted a kernel that was missing."""
    return _thread.wanted


def rehearsed(run: Callable[[], T]) -> T:
    """Run something that may be run twice, with all kernels that it lacks built together, in parallel.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    with rehearsal() as missing:
        result = run()
    if not missing:
        return result
    for built in jit.build_many(missing.values(), progress=sys.stderr.isatty()).values():
        if isinstance(built, Exception):
            raise built
    return run()
