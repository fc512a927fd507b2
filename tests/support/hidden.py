"""Hides every compiler of this machine from this process, as on one where none is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qcut import jit
from qcut.jit import toolchain

PACKAGES = ("cutlass_cppgen", "cutlass_library", "cuda.core", "cuda.bindings", "cuda.pathfinder", "nvidia")
"""What brings compilers and their headers."""


def hide_compilers() -> None:
    """Take away nvcc, g++, NVRTC, the CUDA headers and nvidia-cutlass, for the rest of the process."""
    for name in list(sys.modules):
        if name.startswith(tuple(f"{package}." for package in PACKAGES)):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(PACKAGES))  # None: a module that is known not to be there
    os.environ["PATH"] = ""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        os.environ.pop(name, None)
    toolchain.SYSTEM_CUDA = Path("/nowhere")
    toolchain.reset()
    for kind in ("nvrtc", "nvcc"):
        assert jit.missing_toolchain(kind) is not None, kind
