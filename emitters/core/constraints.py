"""Constraints of kernel families as data: each has a name and a reason, which a refusal quotes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qcut.emitters.core.arch import ARCHITECTURES, CLUSTER_ARCHITECTURES, SMEM_LIMITS, architecture
from qcut.emitters.core.source import FLOATS, DType, EmitError


@dataclass(frozen=True)
class Constraint:
    """One constraint of a kernel family.

    Attributes:
        name: the constraint's name in a refusal.
        reason: the allowed values, and the reason for the limit.
        holds: returns whether the arguments of a family's check satisfy the constraint.
    """

    name: str
    reason: str
    holds: Callable[..., bool]


def check(kernel: str, constraints: Sequence[Constraint], *arguments: object) -> None:
    """Check a description against a family's constraints, in order: a later constraint may rely on earlier ones.

    Raises:
        EmitError: a constraint is broken. The message has the kernel's name, which spells the sizes, and the first
            broken constraint.
    """
    for constraint in constraints:
        if not constraint.holds(*arguments):
            raise EmitError(f"{kernel}: {constraint.name}: {constraint.reason}")


def require(condition: bool, name: str, why: str) -> None:
    """Raise `EmitError` naming the kernel and the constraint it breaks."""
    if not condition:
        raise EmitError(f"{name}: {why}")


def can_make(make: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    """Whether ``make`` describes a kernel of these arguments, and raises no `EmitError`."""
    try:
        make(*arguments, **options)
    except EmitError:
        return False
    return True


FLOAT_X = Constraint("x", "is f16, bf16 or f32", lambda kernel: kernel.x in FLOATS)
"""Constraint of kernels that read floats; takes the kernel."""
HALF_X = Constraint("x", "is f16 or bf16", lambda kernel: kernel.x in (DType.F16, DType.BF16))
"""Constraint of kernels that multiply 16-bit floats on tensor cores; takes the kernel."""
ARCHITECTURE = Constraint(
    "architecture", f"allowed are {', '.join(ARCHITECTURES)}", lambda problem, tile, arch: arch in ARCHITECTURES
)
"""Constraint of families that every architecture runs; takes (problem, tile, arch)."""
SPLITS = Constraint(
    "splits",
    "are 1, 2, 4 or 8: the CTAs of a portable cluster",
    lambda problem, tile, arch: tile.splits in (1, 2, 4, 8),
)
"""Constraint of families that split K over a cluster; takes (problem, tile, arch)."""
CLUSTERS = Constraint(
    "clusters",
    f"splits need thread-block clusters: {', '.join(CLUSTER_ARCHITECTURES)}",
    lambda problem, tile, arch: tile.splits == 1 or architecture(arch).clusters,
)
"""Constraint of families that split K over a cluster; takes (problem, tile, arch)."""


def shared_memory(needs: str, smem_bytes: Callable[[Any, Any], int]) -> Constraint:
    """The limit of a CTA's dynamic shared memory; the constraint takes (problem, tile, arch).

    Args:
        needs: what the memory holds, for the error message.
        smem_bytes: (problem, tile) → bytes of the kernel's shared memory.
    """
    return Constraint(
        "shared_memory",
        f"{needs}: {SMEM_LIMITS}",
        lambda problem, tile, arch: smem_bytes(problem, tile) <= architecture(arch).smem_bytes,
    )


def holds(constraints: Sequence[Constraint], *arguments: object) -> bool:
    """Whether a description satisfies all constraints."""
    return all(constraint.holds(*arguments) for constraint in constraints)
