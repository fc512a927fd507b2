"""Limits of a kernel family as data: each is stated once, with its reason, and is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qcut.emitters.core.source import EmitError


@dataclass(frozen=True)
class Constraint:
    """One limit.

    Attributes:
        name: what a refusal calls it.
        reason: what is allowed, and why.
        holds: whether it is kept, of the arguments a family checks its kernels by.
    """

    name: str
    reason: str
    holds: Callable[..., bool]


def check(kernel: str, constraints: Sequence[Constraint], *arguments: object) -> None:
    """Hold a description to a family's constraints, in order: a later one may rely on an earlier one.

    Raises:
        EmitError: naming the kernel, which spells its sizes, and the first constraint it breaks.
    """
    for constraint in constraints:
        if not constraint.holds(*arguments):
            raise EmitError(f"{kernel}: {constraint.name}: {constraint.reason}")
