"""The index of each row's largest element: the next token of a greedy decoder.

Device code: ``include/qcut/decoder/argmax.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include

_UNROLL = 4
"""Loads that a thread has in flight."""

PARTS = 8
"""CTAs of the cluster that divides a row."""

CONSTRAINTS = (
    FLOAT_X,
    Constraint(
        "parts",
        f"are 1, or {PARTS} where there are thread-block clusters",
        lambda k: k.parts == 1 or (k.parts == PARTS and architecture(k.arch).clusters),
    ),
)
"""Constraints of `ArgmaxRows`."""


@dataclass(frozen=True)
class ArgmaxRows(Kernel):
    """The index of each row's largest element, as ``qcut.numerics.sampling.argmax`` chooses it.

    Attributes:
        x: element type of rows ``[m, columns]``, which may start anywhere.
        arch: real architecture.
        advances: whether each row's position and slot are raised by one, up to ``context - 1`` and ``context``, at the
            end of a decoder's step.
        parts: CTAs of a cluster that divide a row.
        host_copy: whether each index is also copied to pinned host memory.

    Exactness: bitwise.
    """

    x: DType
    arch: str
    advances: bool = False
    parts: int = 1
    host_copy: bool = False

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_argmax_{arch}_{x}``, ``_a`` if it advances, ``_h`` with a host copy, ``_c{parts}`` with clusters."""
        flags = "_a" * self.advances + "_h" * self.host_copy + f"_c{self.parts}" * (self.parts > 1)
        return f"qcut_argmax_{self.arch.replace('_', '')}_{self.x.value}{flags}"

    @property
    def block(self) -> int:
        """Threads of a CTA: one SM keeps a row's loads in flight."""
        return 1024

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, 1, 1) if self.parts == 1 else (self.parts, m, 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``best``, int64 ``[m]``; ``stride`` of rows in elements; ``columns``.

        Where it advances, ``positions`` and ``slots``, int32 ``[m]``, before the stride, and ``context`` after the
        columns. With a host copy, ``host_copy``, int64 ``[turns, m]`` in pinned host memory; ``turn``, int32 ``[m]``,
        the row of ``host_copy`` that the step writes; ``turns``.
        """
        state = (Param("positions", "ptr", "int*"), Param("slots", "ptr", "int*")) if self.advances else ()
        context = (Param("context", "i32"),) * self.advances
        return (
            Param("x", "ptr", f"const {self.x.cpp}*"),
            Param("best", "ptr", "long long*"),
            *state,
            Param("stride", "i64"),
            Param("columns", "i32"),
            *context,
            *(Param("host_copy", "ptr", "long long*"), Param("turn", "ptr", "int*"), Param("turns", "i32"))
            * self.host_copy,
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        params = self.params()
        state = call_arguments(("positions", "slots"), params)
        context = call_arguments(("context",), params, absent="0")
        parts = f", {self.parts}" if self.parts > 1 else ""
        host_copy = ", host_copy, turn, turns" if self.host_copy else ""
        return self._source(
            f"qcut::argmax_rows<{self.x.cpp}, {flag(self.advances)}, {self.block}, {_UNROLL}{parts}>"
            f"(x, best, {state}, stride, columns, {context}{host_copy});",
            device_code=include("decoder/argmax.cuh"),
            cluster=self.parts,
        )
