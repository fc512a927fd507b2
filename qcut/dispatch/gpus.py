"""Describes GPUs for dispatch, from a compute capability, or from a name without asking a driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from qcut.dispatch.machines import MACHINES, Machine, Rates, machine_for
from qcut.errors import UnsupportedError

_ARCH = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}


@dataclass(frozen=True)
class Target:
    """A GPU as dispatch sees it.

    Attributes:
        arch: architecture kernels are compiled for.
        sm_count: multiprocessors.
        name: the GPU's name as the driver reports it, which selects the tuned table.
        rates: clock and bandwidth as the driver states them, of GPUs that are not known by name.
        ahead_of_time: whether kernels are chosen only among those of `qcut.dispatch.precompile`, which a wheel brings.
    """

    arch: str
    sm_count: int
    name: str = ""
    rates: Rates | None = None
    ahead_of_time: bool = False

    @property
    def exchanges_in_clusters(self) -> bool:
        """Whether kernels with CTAs that exchange results in a cluster were measured on the architecture.

        Elsewhere attention divides a context among CTAs that meet in a workspace, and one CTA reads a row of logits.
        """
        return self.arch == "sm_90a"

    @cached_property
    def machine(self) -> Machine:
        """The description of the GPU that cost models read."""
        return machine_for(self.arch, self.sm_count, self.name, self.rates)


GPUS = tuple(Target(machine.arch, machine.sm_count, name) for name, machine in MACHINES.items())
"""Known GPUs, so that dispatch can be asked about them on any machine."""


def target_for(
    capability: tuple[int, int], sm_count: int, name: str = "", rates: Callable[[], Rates] | None = None
) -> Target:
    """Map a compute capability to the architecture kernels are compiled for.

    Args:
        capability: compute capability, major and minor.
        sm_count: multiprocessors.
        name: the GPU's name as the driver reports it.
        rates: asks the driver for clock and bandwidth; called for GPUs that are not known by name.

    Raises:
        UnsupportedError: the GPU is older than compute capability 8.0, or unknown.
    """
    arch = _ARCH.get(capability) or _ARCH.get((capability[0], 0))
    if arch is None or capability < (8, 0):
        known = ", ".join(f"{major}.{minor}" for major, minor in _ARCH)
        raise UnsupportedError(
            f"GPU {name or '?'} has compute capability {capability[0]}.{capability[1]}; qcut's kernels run on {known}"
        )
    machine = MACHINES.get(name.strip())
    if rates is None or (machine is not None and machine.sm_count == sm_count):
        return Target(arch, sm_count, name)
    return Target(arch, sm_count, name, rates())


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
