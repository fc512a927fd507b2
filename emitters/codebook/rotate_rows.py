"""Hadamard rotations of rows within the kernels that compute them, into the blocks or int8 rows that products read.

`qcut.emitters.codebook.rotate` has the formula, and kernels that read rows from memory. Device code:
``include/qcut/codebook/rotate_rows.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.codebook.rotate import BLOCK_FLOATS, group_factor
from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.source import DType, Param
from qcut.emitters.core.text import include

GROUPS = (32, 64, 128)
"""Columns of a group: those of a warp hold whole groups, which need no padding."""

_HELD = 5
"""Rotated vectors that a thread has registers for, until the row's largest magnitude is known."""


@dataclass(frozen=True)
class RowsRotation:
    """How a kernel rotates the rows that it makes.

    Attributes:
        out: of the blocks: s8, with a scale for each row, or the rows' 16-bit type.
        group: columns of a group, which divide those of a row.
        passes: rotations of the same columns, 1 or 2; 1 in rows.
        in_rows: s8 lies in rows and not in blocks, as `qcut.emitters.codebook.rotate.RotateTokens` has it row-major.
    """

    out: DType
    group: int
    passes: int = 1
    in_rows: bool = False

    @property
    def name(self) -> str:
        """``_h{group}p{passes}``, ``s8`` if results are int8, and ``_rows`` if they lie in rows."""
        return f"_h{self.group}p{self.passes}{'s8' * self.quantized}{'_rows' * self.in_rows}"

    @property
    def quantized(self) -> bool:
        """Whether results are int8: a CTA then needs the largest magnitude of its row."""
        return self.out is DType.S8

    @property
    def device_code(self) -> str:
        """The line that includes the header."""
        return include("codebook/rotate_rows.cuh")

    def params(self) -> tuple[Param, ...]:
        """``signs``, as those of `qcut.emitters.codebook.rotate.RotateTokens`; ``k_padded``, columns of a pass.

        In rows, ``k_padded`` are the columns of a row of int8.
        """
        return (Param("signs", "ptr", "const uint32_t*"), Param("k_padded", "i32"))

    def device_class(self, x: DType, vectors: int, threads: int, columns: int = 8) -> str:
        """The class of C++ that rotates ``vectors`` vectors of so many columns of each of a CTA's threads."""
        template = f"{x.cpp}, {self.out.cpp}, {self.group}, {self.passes}, {vectors}, {threads}"
        options = f", {columns}, true" if self.in_rows else f", {columns}" if columns != 8 else ""
        return f"qcut::RotatedRows<{template}{options}>"

    def argument(self, x: DType, vectors: int, threads: int, columns: int = 8) -> str:
        """An object of `device_class`."""
        return f"{self.device_class(x, vectors, threads, columns)}(signs, k_padded, {group_factor(self.group)})"

    def is_legal(self, x: DType, vectors: int) -> bool:
        """Whether a kernel of x's type can rotate so many vectors of each thread."""
        if x not in BLOCK_FLOATS or self.out not in (x, DType.S8):
            return False
        held = vectors * self.passes <= _HELD or not self.quantized
        rows = not self.in_rows or (self.quantized and self.passes == 1)
        return held and rows and self.group in GROUPS and self.passes in (1, 2)


ROTATION = Constraint(
    "rotation",
    f"is of f16 or bf16 to that type or to s8, in groups of {', '.join(map(str, GROUPS))}, 1 or 2 passes; to s8 up to "
    f"{_HELD} vectors of a thread, all passes together; in rows to s8 in 1 pass",
    lambda k: k.rotation is None or k.rotation.is_legal(k.x, k.vectors),
)
"""Constraint of kernels with a ``rotation``; takes the kernel."""
