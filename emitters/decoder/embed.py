"""Token embeddings, dequantized if they are int8, plus position embeddings.

Device code: ``include/qcut/decoder/embed.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include

CONSTRAINTS = (
    FLOAT_X,
    Constraint("table", "is x's type, or s8", lambda k: k.table in (k.x, DType.S8)),
)
"""Constraints of `EmbedRows`."""


@dataclass(frozen=True)
class EmbedRows(Kernel):
    """Token embeddings ``[rows, k]`` by int64 ids, and position embeddings by int32 places::

        y[r] = x(table[ids[r]])                               a table in x
        y[r] = x(f32(table[ids[r]]) * scale[ids[r]])          of int8 rows, each with a float32 scale
        y[r] = rne(y[r] + place_table[places[r]])             with places

    An id or place beyond a table reads the table's nearest row: the kernel reads nothing outside of the tables.

    Attributes:
        x: element type of the result and of the positions.
        table: element type of the token embeddings: x, or s8.
        arch: real architecture.
        places: whether there are positions.
        aligned: rows of x start at multiples of 16 bytes, those of s8 at multiples of as many elements. False reads
            single elements.
        zeroes: whether the kernel also writes zeros, for kernels after it.

    Exactness: bitwise equal to eager modules.
    """

    x: DType
    table: DType
    arch: str
    places: bool = False
    aligned: bool = True
    zeroes: bool = False

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_embed_{arch}_{x}_{table}``, ``_p`` with places, ``_z`` with zeros, and ``_u`` where unaligned."""
        flags = "_p" * self.places + "_z" * self.zeroes + "_u" * (not self.aligned)
        return f"qcut_embed_{self.arch.replace('_', '')}_{self.x.value}_{self.table.value}{flags}"

    @property
    def block(self) -> int:
        """Threads of a CTA, each with 16 bytes of the result."""
        return 128

    def grid(self, rows: int, k: int) -> tuple[int, int, int]:
        """CTAs for rows of k columns."""
        return (-(-rows * -(-k * self.x.bits // 128) // self.block), 1, 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``ids``; ``table``; ``scale`` (s8 only); ``places, place_table`` (with places); ``y``; ``stride`` and
        ``place_stride`` (with places) of rows in elements; ``count`` and ``place_count`` (with places) of rows;
        ``rows``; ``k``; ``zeroed``, float32, and their number ``zeros`` (with zeros).
        """
        x = self.x.cpp
        tables = (Param("places", "ptr", "const int*"), Param("place_table", "ptr", f"const {x}*"))
        return (
            Param("ids", "ptr", "const long long*"),
            Param("table", "ptr", f"const {self.table.cpp}*"),
            *(Param("scale", "ptr", "const float*"),) * (self.table is DType.S8),
            *tables * self.places,
            Param("y", "ptr", f"{x}*"),
            *(Param(name, "i64") for name in ("stride", *["place_stride"] * self.places)),
            *(Param(name, "i32") for name in ("count", *["place_count"] * self.places, "rows", "k")),
            *(Param("zeroed", "ptr", "float*"), Param("zeros", "i32")) * self.zeroes,
        )

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        params = self.params()
        pointers = call_arguments(("ids", "table", "scale", "places", "place_table", "y"), params)
        sizes = call_arguments(("stride", "place_stride", "count", "place_count", "rows", "k"), params, absent="0")
        return self._source(
            f"qcut::embed_rows<{self.x.cpp}, {self.table.cpp}, {flag(self.places)}, {self.block}, {flag(self.aligned)}>"
            f"({pointers}, {sizes});",
            *[f"qcut::write_zeros<{self.block}>(zeroed, zeros);"] * self.zeroes,
            device_code=include("decoder/embed.cuh"),
        )
