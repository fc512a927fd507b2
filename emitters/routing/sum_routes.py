"""The weighted sum of each token's results over its routes.

Device code: ``include/qcut/routing/sum_routes.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import FLOAT_X
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import flag

MANY_TOKENS = 64
"""Tokens from which loads of results that are left out cost more than loads that wait for the experts."""
CONSTRAINTS = (FLOAT_X,)
"""Constraints of `SumRoutes`."""


@dataclass(frozen=True)
class SumRoutes(Kernel):
    """The weighted sum of each token's results, as ``qcut.numerics.routing.sum_routes`` computes it.

    Attributes:
        x: element type of results, and of the sum.
        arch: real architecture.
        many: whether the kernel is meant for `MANY_TOKENS` tokens and more; results are the same.
        aligned: rows start at multiples of 16 bytes. False loads single elements.

    Exactness: bitwise.
    """

    x: DType
    arch: str
    many: bool = False
    aligned: bool = True

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_sum_routes_{arch}_{x}``, ``_m`` for many tokens, ``_u`` if unaligned."""
        flags = "_m" * self.many + "_u" * (not self.aligned)
        return f"qcut_sum_routes_{self.arch.replace('_', '')}_{self.x.value}{flags}"

    @property
    def block(self) -> int:
        """Threads of a CTA: few, so that the columns of one token are spread over several SMs."""
        return 64

    def grid(self, m: int, columns: int) -> tuple[int, int, int]:
        """CTAs for m tokens."""
        return (m, -(-columns * self.x.bits // (128 * self.block)), 1)

    def params(self) -> tuple[Param, ...]:
        """``results`` ``[m * top_k, columns]``; ``weights``, float32 ``[m, top_k]``; ``experts``, int32 ``[m, top_k]``.

        Then ``added`` ``[m, columns]`` or null; ``y`` ``[m, columns]``; ``top_k``; ``count`` of experts; ``columns``.
        """
        x = f"const {self.x.cpp}*"
        return (
            Param("results", "ptr", x),
            Param("weights", "ptr", "const float*"),
            Param("experts", "ptr", "const int*"),
            Param("added", "ptr", x),
            Param("y", "ptr", f"{self.x.cpp}*"),
            *(Param(name, "i32") for name in ("top_k", "count", "columns")),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        options = f"{flag(self.many)}, {self.block}, {flag(self.aligned)}"
        return self._call(f"sum_routes<{self.x.cpp}, {options}>", "routing/sum_routes.cuh")
