"""Kernels as binaries, for tests of what they are without a GPU."""

from __future__ import annotations

from dataclasses import replace

from qcut import jit
from qcut.emitters.core.source import KernelSource


def build(*sources: KernelSource) -> list[jit.Binary]:
    """With NVRTC, or with nvcc where NVRTC is not installed: the device text is the same."""
    if not jit.is_toolchain_available("nvrtc"):
        sources = tuple(replace(source, toolchain="nvcc") for source in sources)
    built = jit.build_many(sources, progress=False)
    for result in built.values():
        if isinstance(result, Exception):
            raise result
    return [result for result in built.values() if isinstance(result, jit.Binary)]
