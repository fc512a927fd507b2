"""The architectures that kernels are compiled for, and what each of them gives a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.errors import EmitError


@dataclass(frozen=True)
class Architecture:
    """One real architecture.

    Attributes:
        name: as compilers spell it. Only ``sm_90a`` has ``wgmma`` and ``setmaxnreg``.
        smem_bytes: dynamic shared memory that one CTA may use.
        sm_smem_bytes: shared memory of a multiprocessor; each CTA takes 1 KiB in addition to its own.
        clusters: whether there are thread-block clusters.
        e4m3: whether an instruction that qcut emits, ``mma.sync`` or ``wgmma``, multiplies e4m3 on tensor cores.
        wgmma: whether there are ``wgmma`` and ``setmaxnreg``.
        pdl: whether kernels are launched before their predecessors end (programmatic dependent launch).
        registers: 32-bit registers of a multiprocessor.

    Source: CUDA C++ Programming Guide, "Compute Capabilities".
    """

    name: str
    smem_bytes: int
    sm_smem_bytes: int
    clusters: bool = False
    e4m3: bool = False
    wgmma: bool = False
    pdl: bool = False
    registers: int = 65_536


_TABLE = (
    Architecture("sm_80", 163 << 10, 164 << 10),
    Architecture("sm_86", 99 << 10, 100 << 10),
    Architecture("sm_89", 99 << 10, 100 << 10, e4m3=True),
    Architecture("sm_90a", 227 << 10, 228 << 10, clusters=True, e4m3=True, wgmma=True, pdl=True),
    Architecture("sm_100", 227 << 10, 228 << 10, clusters=True, pdl=True),
    Architecture("sm_120", 99 << 10, 100 << 10, clusters=True, e4m3=True, pdl=True),
)
_BY_NAME = {architecture.name: architecture for architecture in _TABLE}

ARCHITECTURES = tuple(_BY_NAME)
"""Names of the architectures, the oldest first."""
E4M3_ARCHITECTURES = tuple(architecture.name for architecture in _TABLE if architecture.e4m3)
"""Names of those that multiply e4m3."""
CLUSTER_ARCHITECTURES = tuple(architecture.name for architecture in _TABLE if architecture.clusters)
"""Names of those with thread-block clusters."""
SMEM_LIMITS = ", ".join(f"{architecture.smem_bytes} bytes on {architecture.name}" for architecture in _TABLE)
"""Dynamic shared memory of a CTA on each architecture, for messages."""

_CLUSTERS_OF_132 = {1: 132, 2: 66, 4: 30, 8: 15}
"""Of an H200, by their size, as its driver states: multiprocessors of a GPC that find no partners stay out."""


def clusters_at_once(size: int, sm_count: int) -> int:
    """Clusters of ``size`` CTAs, one CTA to a multiprocessor, that run at once."""
    return sm_count * _CLUSTERS_OF_132[size] // 132


def architecture(name: str) -> Architecture:
    """Return the architecture of a name.

    Raises:
        EmitError: the name is none of `ARCHITECTURES`.
    """
    found = _BY_NAME.get(name)
    if found is None:
        raise EmitError(f"architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return found
