"""The index of each row's largest element: the next token of a greedy decoder.

Device code: ``include/qcut/decoder/argmax.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import FLOATS, DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include, kernel_source

_UNROLL = 4
"""Elements that a thread has on their way."""

CONSTRAINTS = (Constraint("x", "is f16, bf16 or f32", lambda k: k.x in FLOATS),)
"""What `ArgmaxRows` can be."""


@dataclass(frozen=True)
class ArgmaxRows:
    """The index of each row's largest element, as ``qcut.numerics.sampling.argmax`` chooses it.

    Attributes:
        x: element type of rows ``[m, columns]``, which may start anywhere.
        arch: real architecture.
        advances: whether each row's position and slot are raised by one, up to ``context - 1`` and ``context``, at the
            end of a decoder's step.

    Exactness: bitwise.
    """

    x: DType
    arch: str
    advances: bool = False

    def __post_init__(self) -> None:
        check(self.name, CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_argmax_{arch}_{x}``, and ``_a`` where it advances."""
        return f"qcut_argmax_{self.arch.replace('_', '')}_{self.x.value}{'_a' * self.advances}"

    @property
    def block(self) -> int:
        """Threads of a CTA: one SM keeps a row's loads in flight."""
        return 1024

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``best``, int64 ``[m]``; ``stride`` of rows in elements; ``columns``.

        Where it advances, ``positions`` and ``slots``, int32 ``[m]``, before the stride, and ``context`` last.
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
        )


def emit_argmax(desc: ArgmaxRows) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``."""
    params = desc.params()
    state = call_arguments(("positions", "slots"), params)
    context = call_arguments(("context",), params, absent="0")
    return kernel_source(
        desc.name,
        desc.arch,
        params,
        f"qcut::argmax_rows<{desc.x.cpp}, {flag(desc.advances)}, {desc.block}, {_UNROLL}>"
        f"(x, best, {state}, stride, columns, {context});",
        device_code=include("decoder/argmax.cuh"),
        block=desc.block,
        waits=True,
    )
