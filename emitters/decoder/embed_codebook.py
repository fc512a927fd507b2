"""Token embeddings in a codebook weight, plus position embeddings.

Device code: ``include/qcut/decoder/embed_codebook.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.codebook.rotate import group_factor
from qcut.emitters.codebook.rotate_rows import GROUPS
from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include

_COLUMNS = 16  # of a thread
CONSTRAINTS = (
    FLOAT_X,
    Constraint("norms", "are f16 or f32", lambda k: k.norms in (DType.F16, DType.F32)),
    Constraint(
        "bits", "are 2, 3 or 4 of each of 1 or 2 passes", lambda k: len(k.bits) in (1, 2) and set(k.bits) <= {2, 3, 4}
    ),
    Constraint("group", f"is 0, {', '.join(map(str, GROUPS))}", lambda k: k.group in (0, *GROUPS)),
    Constraint("pairs", "go with one pass of 4 bits", lambda k: not k.pairs or k.bits == (4,)),
)
"""Constraints of `EmbedCodebook`."""


@dataclass(frozen=True)
class EmbedCodebook(Kernel):
    """Token embeddings ``[rows, k]`` of a codebook weight by int64 ids, and position embeddings by int32 places.

    `qcut.ops.embed.EmbedCodebook` has the formula. An id or place beyond a table reads the table's nearest row.

    Attributes:
        x: element type of the result and of the positions.
        norms: element type of the weight's group scales: f16 or f32.
        bits: bits of an index, for each residual stage.
        group: columns of a rotated group; 0: no rotation.
        arch: real architecture.
        pairs: whether the codebook is of pairs.
        places: whether there are positions.
        zeroes: whether the kernel also writes zeros, for kernels after it.

    Exactness: bitwise equal to eager modules.
    """

    x: DType
    norms: DType
    bits: tuple[int, ...]
    group: int
    arch: str
    pairs: bool = False
    places: bool = False
    zeroes: bool = False

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_embed_codebook_{arch}_{x}_b{bits}``, both passes' bits; ``_pairs``; ``_h{group}`` where rotated.

        Then ``_n{norms}``, ``_p`` with places, and ``_z`` with zeros.
        """
        flags = "_pairs" * self.pairs + f"_h{self.group}" * (self.group > 0) + f"_n{self.norms.value}"
        flags += "_p" * self.places + "_z" * self.zeroes
        bits = "".join(map(str, self.bits))
        return f"qcut_embed_codebook_{self.arch.replace('_', '')}_{self.x.value}_b{bits}{flags}"

    @property
    def block(self) -> int:
        """Threads of a CTA, each with 16 columns."""
        return 128

    def grid(self, rows: int, k: int) -> tuple[int, int, int]:
        """CTAs for rows of k columns."""
        return (-(-rows * k // (_COLUMNS * self.block)), 1, 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``ids``; of each pass its first unit ``units{i}``, its ``codebook{i}`` and the bytes of a row tile,
        ``tile_bytes{i}``; ``norms``; ``signs`` (rotated); ``places, place_table`` (with places); ``y``;
        ``place_stride`` in elements (with places); ``count`` and ``place_count`` (with places) of rows; ``rows``;
        ``k``; ``k_padded``, columns of a pass in memory; ``group``, columns of a norm; ``zeroed``, float32, and their
        number ``zeros`` (with zeros).
        """
        x = self.x.cpp
        tables = (Param("places", "ptr", "const int*"), Param("place_table", "ptr", f"const {x}*"))
        weights = (
            (
                Param(f"units{i}", "ptr", "const char*"),
                Param(f"codebook{i}", "ptr", "const float*"),
                Param(f"tile_bytes{i}", "i64"),
            )
            for i in range(len(self.bits))
        )
        return (
            Param("ids", "ptr", "const long long*"),
            *(param for weight in weights for param in weight),
            Param("norms", "ptr", f"const {self.norms.cpp}*"),
            *(Param("signs", "ptr", "const uint32_t*"),) * (self.group > 0),
            *tables * self.places,
            Param("y", "ptr", f"{x}*"),
            *(Param("place_stride", "i64"),) * self.places,
            *(Param(name, "i32") for name in ("count", *["place_count"] * self.places)),
            *(Param(name, "i32") for name in ("rows", "k", "k_padded", "group")),
            *(Param("zeroed", "ptr", "float*"), Param("zeros", "i32")) * self.zeroes,
        )

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        params = self.params()
        passes = ", ".join(f"{{units{i}, codebook{i}, tile_bytes{i}}}" for i in range(len(self.bits)))
        pointers = call_arguments(("places", "place_table", "y"), params)
        sizes = call_arguments(("place_stride", "count", "place_count", "rows", "k"), params, absent="0")
        signs, factor = call_arguments(("signs",), params), group_factor(self.group) if self.group else "1.0f"
        flags = f"{flag(self.pairs)}, {flag(self.places)}, {self.block}, {', '.join(map(str, self.bits))}"
        return self._source(
            f"const qcut::CodebookPass passes[] = {{{passes}}};",
            f"qcut::embed_codebook<{self.x.cpp}, {self.norms.cpp}, {self.group}, {flags}>"
            f"(ids, passes, norms, {signs}, {factor}, {pointers}, {sizes}, k_padded, group);",
            *[f"qcut::write_zeros<{self.block}>(zeroed, zeros);"] * self.zeroes,
            device_code=include("decoder/embed_codebook.cuh"),
        )
