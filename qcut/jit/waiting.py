"""Waiting for compilers: `require` builds missing kernels now or in the background, and dry runs find them.

``QCUT_BUILD`` decides for callers that have a fallback kernel. `dry_run_first` builds all kernels that a piece of work
lacks together.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from qcut.emitters.core.source import KernelSource
from qcut.errors import BuildError, ConfigError
from qcut.jit import background
from qcut.jit.build import Binary, build_many, find
from qcut.jit.launch import Kernel

VARIABLE = "QCUT_BUILD"
"""Environment variable, one of `MODES`; ``background`` is the default.

``wait``: every call waits for its best kernel. ``background``: a call launches a fallback kernel while the best one is
built, except under the capture of a CUDA graph, which would keep the fallback. ``fallback``: under a capture too.
"""

MODES = ("background", "wait", "fallback")

T = TypeVar("T")
_without_fallbacks: list[None] = []


class _Thread(threading.local):
    """State of each thread: missing kernels of a dry run by name, and how often dry runs asked for a missing one."""

    missing: dict[str, KernelSource] | None = None
    asked = 0


_thread = _Thread()


# ── now or in the background ─────────────────────────────────────────────────────────────────────


def build_mode() -> str:
    """The value of ``QCUT_BUILD``; ``wait`` within `no_fallbacks`, and if this process can start no other.

    Raises:
        ConfigError: ``QCUT_BUILD`` is not one of `MODES`.
    """
    mode = os.environ.get(VARIABLE) or "background"
    if mode not in MODES:
        raise ConfigError(f"{VARIABLE} is {mode!r}; allowed: {', '.join(MODES)}")
    return "wait" if _without_fallbacks or not sys.executable else mode


@contextlib.contextmanager
def no_fallbacks() -> Iterator[None]:
    """Let all callers, in any thread, wait for the best kernel until the block ends, whatever ``QCUT_BUILD`` says."""
    _without_fallbacks.append(None)
    try:
        yield
    finally:
        _without_fallbacks.pop()


def require(
    sources: Iterable[KernelSource], *, wait: bool = True, first: bool = False, progress: bool = False
) -> dict[str, Binary | None]:
    """Return kernels that are ready; build the others now, in parallel, or queue them for the background.

    Args:
        sources: kernels; sources of the same name are one kernel.
        wait: build missing kernels now. False queues them.
        first: queue before other kernels, for a caller that uses a fallback kernel until then.
        progress: show a bar on stderr while something compiles, if a terminal is there.

    Returns:
        Binaries by kernel name, None for a queued kernel. A kernel is absent if its build in the background has failed.

    Raises:
        BuildError: the first kernel that does not compile, of those that are built now.
    """
    if wait:
        built = build_many(sources, progress=progress and sys.stderr.isatty())
        for result in built.values():
            if isinstance(result, BuildError):
                raise result
        return {name: result for name, result in built.items() if isinstance(result, Binary)}
    found: dict[str, Binary | None] = {}
    for source in sources:
        binary = find(source)
        if binary is not None or background.builder.later(background.kernel_job(source), first=first):
            found[source.name] = binary
    return found


# ── dry runs ─────────────────────────────────────────────────────────────────────────────────────


class UnbuiltKernel(Kernel):
    """A kernel that has yet to be built; a launch does nothing."""

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


@contextlib.contextmanager
def dry_run() -> Iterator[dict[str, KernelSource]]:
    """Launch only kernels that are built, in this thread, and collect the sources of the others by name.

    Plans made of missing kernels are not kept (see `asked`). Results are right if nothing is missing.
    """
    outer, _thread.missing = _thread.missing, {}
    try:
        yield _thread.missing
    finally:
        _thread.missing = outer


def unbuilt_kernel(source: KernelSource, device: int) -> UnbuiltKernel | None:
    """A kernel that a dry run of this thread skips, since it is missing; None outside a dry run, or if it is built."""
    if _thread.missing is None or find(source) is not None:
        return None
    _thread.missing[source.name] = source
    _thread.asked += 1
    return UnbuiltKernel(source, device)


def asked() -> int:
    """How often dry runs of this thread asked for a kernel that was missing."""
    return _thread.asked


def dry_run_first(run: Callable[[], T]) -> T:
    """Run something that may be run twice, with all kernels that it lacks built together, in parallel.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    with dry_run() as missing:
        result = run()
    if not missing:
        return result
    require(missing.values(), progress=True)
    return run()
