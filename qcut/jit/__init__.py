"""Builds, caches and launches kernels. Arguments are integers (pointers, sizes, a stream), never tensors.

Importing this package finds no compiler, loads no driver and makes no CUDA context.
"""

from qcut.jit import background as background
from qcut.jit.build import Binary, build, build_many, find, is_toolchain_available, missing_toolchain
from qcut.jit.compilers import Resources
from qcut.jit.launch import Kernel, load
from qcut.jit.waiting import require

__all__ = [
    "Binary",
    "Kernel",
    "Resources",
    "build",
    "build_many",
    "find",
    "is_toolchain_available",
    "load",
    "missing_toolchain",
    "require",
]
