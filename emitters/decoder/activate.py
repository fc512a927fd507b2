"""The activation between an MLP's projections: a gated SiLU, or GELU.

Device code: ``include/qcut/decoder/activate.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import FLOATS, DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include, kernel_source

ACTIVATIONS = ("silu_mul", "gelu_tanh")
"""Kinds of `ActivateRows`."""

CONSTRAINTS = (
    Constraint("kind", f"is {' or '.join(ACTIVATIONS)}", lambda k: k.kind in ACTIVATIONS),
    Constraint("x", "is f16, bf16 or f32", lambda k: k.x in FLOATS),
)
"""What `ActivateRows` can be."""


@dataclass(frozen=True)
class ActivateRows:
    """The activation between an MLP's projections, of rows ``[m, columns]``, in float32 and rounded to x's type::

        silu_mul   y = rne(rne(x / (1 + exp(-x))) * up)
        gelu_tanh  y = rne(x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))))

    Attributes:
        kind: see above.
        x: element type.
        arch: real architecture.
        aligned: rows start at multiples of 16 bytes, those of y too. False loads single elements.

    Exactness: before they are rounded, silu and GELU are within ``2**-21 |x|``.
    """

    kind: str
    x: DType
    arch: str
    aligned: bool = True

    def __post_init__(self) -> None:
        check(self.name, CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_{kind}_{arch}_{x}``, and ``_u`` where unaligned."""
        return f"qcut_{self.kind}_{self.arch.replace('_', '')}_{self.x.value}{'' if self.aligned else '_u'}"

    @property
    def block(self) -> int:
        """Threads of a CTA, each with 16 bytes."""
        return 128

    def grid(self, m: int, columns: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, -(-columns * self.x.bits // (128 * self.block)), 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``up`` (silu_mul alone); ``y``; ``absmax``; ``x_stride``; ``up_stride`` (silu_mul alone); ``columns``.

        Absmax is null or float32 ``[m]``, which is raised to the largest magnitude of each row of y.
        """
        x = f"const {self.x.cpp}*"
        gated = self.kind == "silu_mul"
        return (
            Param("x", "ptr", x),
            *(Param("up", "ptr", x),) * gated,
            Param("y", "ptr", f"{self.x.cpp}*"),
            Param("absmax", "ptr", "float*"),
            Param("x_stride", "i64"),
            *(Param("up_stride", "i64"),) * gated,
            Param("columns", "i32"),
        )


def emit_activation(desc: ActivateRows) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``."""
    params = desc.params()
    up = call_arguments(("up",), params)
    up_stride = call_arguments(("up_stride",), params, absent="0")
    return kernel_source(
        desc.name,
        desc.arch,
        params,
        f"qcut::activate_rows<{desc.x.cpp}, {flag(desc.kind == 'silu_mul')}, {desc.block}, {flag(desc.aligned)}>"
        f"(x, {up}, y, absmax, x_stride, {up_stride}, columns);",
        device_code=include("decoder/activate.cuh"),
        block=desc.block,
        waits=True,
    )
