"""A kernel that tries, within a bounded time, what attention's cluster form relies on: an exchange within a cluster.

Device code: ``include/qcut/decoder/attention/cluster_probe.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.arch import CLUSTER_ARCHITECTURES
from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.core.text import include, kernel_source
from qcut.emitters.decoder.attention.mma import CLUSTERS

CONSTRAINTS = (
    Constraint("cluster", "is 2, 4 or 8 CTAs", lambda k: k.cluster in CLUSTERS and k.cluster > 1),
    Constraint("arch", f"is one of {', '.join(CLUSTER_ARCHITECTURES)}", lambda k: k.arch in CLUSTER_ARCHITECTURES),
)
"""What `ClusterProbe` can be."""

EXCHANGED = 1
OUTCOMES = {
    0: "did not run",
    EXCHANGED: "exchanged its parts",
    2: "did not start as a whole",
    3: "waited in vain for its parts",
    4: "received wrong values",
}
"""What a CTA says about its cluster, by the number that it writes."""


@dataclass(frozen=True)
class ClusterProbe:
    """One cluster, each CTA of which sends a part to every CTA, as `AttentionMma` with clusters does at its end.

    Attributes:
        arch: real architecture.
        cluster: CTAs of the cluster.
    """

    arch: str
    cluster: int

    def __post_init__(self) -> None:
        check(self.name, CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_cluster_probe_{arch}_c{cluster}``."""
        return f"qcut_cluster_probe_{self.arch.replace('_', '')}_c{self.cluster}"

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs of a launch: one cluster."""
        return (self.cluster, 1, 1)

    @staticmethod
    def params() -> tuple[Param, ...]:
        """``outcomes``, int32 of each CTA, see `OUTCOMES`; ``meeting``, two zeros; ``limit_ns``; ``silent``.

        The kernel ends about ``limit_ns`` after its start at the latest. The CTA of rank ``silent`` sends nothing, so
        that all wait in vain; -1: none.
        """
        return (
            Param("outcomes", "ptr", "int*"),
            Param("meeting", "ptr", "unsigned*"),
            Param("limit_ns", "i64"),
            Param("silent", "i32"),
        )


def emit_cluster_probe(desc: ClusterProbe) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``."""
    return kernel_source(
        desc.name,
        desc.arch,
        desc.params(),
        f"qcut::probe_cluster<{desc.cluster}>(outcomes, meeting, limit_ns, silent);",
        device_code=include("decoder/attention/cluster_probe.cuh"),
        block=32,
        waits=False,
        cluster=desc.cluster,
    )
