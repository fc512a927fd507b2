"""The kernels of layers, built before a layer is called."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from qcut import jit
from qcut.backends.cuda.launch import native
from qcut.backends.cuda.launch.plans import LaunchSpec, describing
from qcut.jit import background
from qcut.jit.waiting import build_mode


class LayerCall(Protocol):
    """A call of a layer at one number of rows: all that chooses its kernels."""

    def launches(self, device: int) -> Sequence[LaunchSpec]:
        """The launches of the call on a device."""

    @property
    def calls_native(self) -> bool:
        """Whether `qcut.backends.cuda.launch.native`, in C++, serves the call."""


def prebuild(calls: Collection[LayerCall], device: int, progress: bool = True) -> None:
    """Build the kernels of calls, in parallel, and the C++ operators if they serve a call.

    Kernels in the cache are not built again. If callers do not wait for nvcc and g++, these work in the background, and
    fallback kernels are built now.

    Args:
        calls: calls of layers, each at one number of rows.
        device: CUDA ordinal.
        progress: show a progress bar, if a terminal is there.

    Raises:
        UnsupportedError: no kernel takes a call.
        BuildError: the first kernel that does not compile.
    """
    with describing():
        specs = {spec.source.name: spec for call in calls for spec in call.launches(device)}
    calls_native = any(call.calls_native for call in calls)
    now, later = [], []
    for spec in specs.values():
        if spec.fallback is not None and build_mode() != "wait" and jit.find(spec.source) is None:
            later.append(spec.source)
            spec = spec.fallback()
        now.append(spec.source)
    with ThreadPoolExecutor(1, thread_name_prefix="qcut-build") as pool:
        operators = pool.submit(native.build) if calls_native and not native.comes_later() else None
        jit.require(now, progress=progress)
    if operators is not None:
        operators.result()
    if calls_native and native.comes_later():  # compilers in the background start when those above have ended
        background.builder.later(native.job())
    jit.require(later, wait=False)
