"""The activation between an MLP's projections: a gated SiLU, also of clamped halves, or GELU.

Device code: ``include/qcut/decoder/activate.cuh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcut.emitters.codebook.rotate_rows import ROTATION, RowsRotation
from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include

ACTIVATIONS = ("silu_mul", "gelu_tanh", "clamped_silu_mul")
"""Kinds of `ActivateRows`."""
_THREADS = 128
_MAX_VECTORS = 4

CONSTRAINTS = (
    Constraint("kind", f"is {' or '.join(ACTIVATIONS)}", lambda k: k.kind in ACTIVATIONS),
    FLOAT_X,
    Constraint("threads", "are 32 to 1024, a multiple of 32", lambda k: k.threads in range(32, 1025, 32)),
    Constraint(
        "vectors",
        f"of a thread are 1 to {_MAX_VECTORS}, and 1 except for a rotation to int8",
        lambda k: 1 <= k.vectors <= (_MAX_VECTORS if k.has_rows else 1),
    ),
    ROTATION,
)
"""Constraints of `ActivateRows`."""


@dataclass(frozen=True)
class ActivateRows(Kernel):
    """The activation between an MLP's projections, of rows ``[m, columns]``, in float32 and rounded to x's type::

        silu_mul          y = rne(rne(x / (1 + exp(-x))) * up)
        gelu_tanh         y = rne(x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))))
        clamped_silu_mul  y = rne(rne(g / (1 + exp(-alpha g))) * w)

    The last one is ``qcut.numerics.gating.clamped_silu_mul``; its numbers are arguments: g is x, of at most the
    limit, and w is up, within the limit, and rounded after 1 is added with ``plus_one``.

    Attributes:
        kind: see above.
        x: element type.
        arch: real architecture.
        aligned: rows start at multiples of 16 bytes, those of y too. False loads single elements.
        rotation: rotates y into blocks of tokens or int8 rows, bitwise as `qcut.emitters.codebook.rotate.RotateTokens`
            makes them; or None.
        threads: threads of a CTA.
        vectors: vectors of 16 bytes of a thread.

    Exactness: before they are rounded, silu of any alpha and GELU are within ``2**-21 |x|``.
    """

    kind: str
    x: DType
    arch: str
    aligned: bool = True
    rotation: RowsRotation | None = None
    threads: int = _THREADS
    vectors: int = 1

    constraints = CONSTRAINTS

    @classmethod
    def rotating(
        cls, kind: str, x: DType, arch: str, columns: int, rotation: RowsRotation, *, aligned: bool = True
    ) -> ActivateRows:
        """The kernel that rotates rows of so many columns. For int8 one CTA has a whole row.

        Raises:
            EmitError: rows longer than 1024 threads hold; see `CONSTRAINTS`.
        """
        if not rotation.quantized:
            return cls(kind, x, arch, aligned, rotation)
        vectors = -(-columns * x.bits // 128)
        each = -(-vectors // 1024)
        return cls(kind, x, arch, aligned, rotation, math.ceil(vectors / each / 32) * 32, each)

    @property
    def name(self) -> str:
        """``qcut_{kind}_{arch}_{x}``, the rotation's name, ``_t{threads}v{vectors}`` of int8, ``_u`` if unaligned."""
        flags = self.rotation.name if self.rotation else ""
        flags += f"_t{self.threads}v{self.vectors}" * self.has_rows + "_u" * (not self.aligned)
        return f"qcut_{self.kind}_{self.arch.replace('_', '')}_{self.x.value}{flags}"

    @property
    def has_rows(self) -> bool:
        """Whether a CTA has a whole row."""
        return self.rotation is not None and self.rotation.quantized

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.threads

    def grid(self, m: int, columns: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, 1 if self.has_rows else -(-columns * self.x.bits // (128 * self.block)), 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``up`` (gated only); ``y``; ``absmax``; ``x_stride``; ``up_stride`` (gated only); ``columns``.

        Of clamped_silu_mul, ``alpha``, ``limit``, infinite for none, and ``plus_one`` follow. Absmax is null or float32
        ``[m]``, which is raised to the largest magnitude of each row of y. With a rotation, ``scale`` takes its place,
        only for int8 blocks, and the rotation's arguments come last.
        """
        x = f"const {self.x.cpp}*"
        gated, clamped = self.kind != "gelu_tanh", self.kind == "clamped_silu_mul"
        return (
            Param("x", "ptr", x),
            *(Param("up", "ptr", x),) * gated,
            Param("y", "ptr", "void*" if self.rotation else f"{self.x.cpp}*"),
            *(Param("scale" if self.rotation else "absmax", "ptr", "float*"),) * (not self.rotation or self.has_rows),
            Param("x_stride", "i64"),
            *(Param("up_stride", "i64"),) * gated,
            Param("columns", "i32"),
            *(Param("alpha", "f32"), Param("limit", "f32"), Param("plus_one", "i32")) * clamped,
            *(self.rotation.params() if self.rotation else ()),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel. A rotation's signs may be read before the last one ends."""
        params, rotation = self.params(), self.rotation
        up = call_arguments(("up",), params)
        up_stride = call_arguments(("up_stride",), params, absent="0")
        gated, aligned = flag(self.kind != "gelu_tanh"), flag(self.aligned)
        gate = ", qcut::ClampedGate{alpha, limit, plus_one}" if self.kind == "clamped_silu_mul" else ""
        statement = (
            f"qcut::activate_rows<{self.x.cpp}, {gated}, {self.block}, {aligned}>"
            f"(x, {up}, y, absmax, x_stride, {up_stride}, columns{gate});"
        )
        if rotation:
            statement = (
                f"qcut::activate_rotated<{self.x.cpp}, {gated}, {self.block}, {self.vectors}, {aligned}>"
                f"(x, {up}, y, {call_arguments(('scale',), params)}, x_stride, {up_stride}, columns, "
                f"{rotation.argument(self.x, self.vectors, self.threads)}{gate});"
            )
        return self._source(
            statement,
            device_code=(rotation.device_code if rotation else "") + include("decoder/activate.cuh"),
            # Without the bound of one CTA to an SM, ptxas spills a word of two vectors to fit two.
            ctas_per_sm=1 if rotation and rotation.in_rows and self.vectors > 1 else None,
        )
