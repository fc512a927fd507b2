"""Describes GPUs for dispatch, from a compute capability, or from a name without asking a driver."""

from __future__ import annotations

from dataclasses import dataclass

from qcut.errors import UnsupportedError

_ARCH = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}


@dataclass(frozen=True)
class Target:
    """A GPU as dispatch sees it.

    Attributes:
        arch: architecture kernels are compiled for.
        sm_count: multiprocessors.
        name: the GPU's name as the driver reports it, which selects the tuned table.
    """

    arch: str
    sm_count: int
    name: str = ""


GPUS = (
    Target("sm_80", 108, "NVIDIA A100-SXM4-80GB"),
    Target("sm_80", 108, "NVIDIA A100-SXM4-40GB"),
    Target("sm_80", 108, "NVIDIA A100 80GB PCIe"),
    Target("sm_86", 72, "NVIDIA A10"),
    Target("sm_86", 84, "NVIDIA A40"),
    Target("sm_86", 82, "NVIDIA GeForce RTX 3090"),
    Target("sm_89", 58, "NVIDIA L4"),
    Target("sm_89", 142, "NVIDIA L40S"),
    Target("sm_89", 128, "NVIDIA GeForce RTX 4090"),
    Target("sm_90a", 132, "NVIDIA H200"),
    Target("sm_90a", 132, "NVIDIA H100 80GB HBM3"),
    Target("sm_90a", 114, "NVIDIA H100 PCIe"),
    Target("sm_100", 148, "NVIDIA B200"),
    Target("sm_120", 170, "NVIDIA GeForce RTX 5090"),
)
"""Known GPUs with their numbers of multiprocessors, so that dispatch can be asked about them on any machine."""


def target_for(capability: tuple[int, int], sm_count: int, name: str = "") -> Target:
    """Map a compute capability to the architecture kernels are compiled for.

    Raises:
        UnsupportedError: the GPU is older than compute capability 8.0, or unknown.
    """
    arch = _ARCH.get(capability) or _ARCH.get((capability[0], 0))
    if arch is None or capability < (8, 0):
        known = ", ".join(f"{major}.{minor}" for major, minor in _ARCH)
        raise UnsupportedError(
            f"GPU {name or '?'} has compute capability {capability[0]}.{capability[1]}; qcut's kernels run on {known}"
        )
    return Target(arch, sm_count, name)


def target_named(name: str) -> Target:
    """The GPU of a name, or the first known GPU of an architecture.

    Raises:
        UnsupportedError: ``name`` is neither a known GPU nor an architecture.
    """
    for gpu in GPUS:
        if name.strip().lower() == gpu.name.lower():
            return gpu
    for gpu in GPUS:
        if name == gpu.arch:
            return Target(gpu.arch, gpu.sm_count)
    known = ", ".join(dict.fromkeys([*(gpu.arch for gpu in GPUS), *(gpu.name for gpu in GPUS)]))
    raise UnsupportedError(f"GPU {name!r} is not known without asking a driver; known: {known}")
