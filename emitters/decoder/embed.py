"""Rows of a table of embeddings, dequantized where they are int8, with those of a table of positions.

Device code: ``include/qcut/decoder/embed.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import DType, KernelSource, Param

FAMILY = "embed"
CONSTRAINTS = (
    Constraint("x", "is f16, bf16 or f32", lambda k: k.x in (DType.F16, DType.BF16, DType.F32)),
    Constraint("table", "is x's type, or s8", lambda k: k.table in (k.x, DType.S8)),
)
"""What `EmbedRows` can be."""


@dataclass(frozen=True)
class EmbedRows:
    """Rows ``[rows, k]`` of a table by int64 ids, and of a table of positions by int32 places::

        y[r] = x(table[ids[r]])                               a table in x
        y[r] = x(f32(table[ids[r]]) * scale[ids[r]])          of int8 rows, each with a float32 scale
        y[r] = rne(y[r] + place_table[places[r]])             with places

    Ids and places beyond the tables read their nearest rows: nothing outside of a table is read.

    Attributes:
        x: element type of the result and of the positions.
        table: of the table: x, or s8.
        arch: real architecture.
        places: whether there are positions.
        aligned: rows of x start at multiples of 16 bytes, those of s8 at multiples of as many elements. False reads
            single elements.

    Exactness: bitwise eager modules'.
    """

    x: DType
    table: DType
    arch: str
    places: bool = False
    aligned: bool = True

    def __post_init__(self) -> None:
        check(self.name, CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_embed_{arch}_{x}_{table}``, ``_p`` with places, and ``_u`` where unaligned."""
        flags = "_p" * self.places + "_u" * (not self.aligned)
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

        ``ids``; ``table``; ``scale`` (s8 alone); ``places, place_table`` (with places); ``y``; ``stride`` and
        ``place_stride`` (with places) of rows in elements; ``count`` and ``place_count`` (with places) of rows;
        ``rows``; ``k``.
        """
        names = ["ids", "table", *["scale"] * (self.table is DType.S8), *["places", "place_table"] * self.places, "y"]
        return (
            *(Param(name, "ptr") for name in names),
            *(Param(name, "i64") for name in ("stride", *["place_stride"] * self.places)),
            *(Param(name, "i32") for name in ("count", *["place_count"] * self.places, "rows", "k")),
        )


def emit_embed(desc: EmbedRows) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. Everything is read after the previous kernel's end."""
    x, params = desc.x.cpp, desc.params()
    types = {"ids": "const long long*", "table": f"const {desc.table.cpp}*", "scale": "const float*", "y": f"{x}*"}
    types |= {"places": "const int*", "place_table": f"const {x}*", "stride": "long long", "place_stride": "long long"}
    names = {p.name for p in params}
    signature = ", ".join(f"{types.get(p.name, 'int')} {p.name}" for p in params)
    order = ("ids", "table", "scale", "places", "place_table", "y", "stride", "place_stride", "count", "place_count")
    missing = {"place_stride": "0", "place_count": "0"}
    given = ", ".join(n if n in names else missing.get(n, "nullptr") for n in (*order, "rows", "k"))
    flags = [str(flag).lower() for flag in (desc.places, desc.aligned)]
    text = (
        "#include <qcut/decoder/embed.cuh>\n\n"
        f'extern "C" __global__ void __launch_bounds__({desc.block})\n'
        f"{desc.name}({signature}) {{\n"
        f"  qcut::embed_rows<{x}, {desc.table.cpp}, {flags[0]}, {desc.block}, {flags[1]}>({given});\n"
        "}\n"
    )
    return KernelSource(
        name=desc.name,
        text=text,
        entry=desc.name,
        params=params,
        arch=desc.arch,
        block=desc.block,
        includes=("qcut", "cuda"),
    )
