"""The problem of all kernels on codebook weights, with its arguments and its name.

``D = act((sum_k x[m, k] * norm[n, slot(k)] * (book[idx[n, k]] + offset[n, slot(k)])) * col_scale[n] + bias[n])
(+ residual)``, x the rotated tokens; most weights have no offsets. Weights, norms and tokens lie in memory as
`qcut.numerics.codebook.layout` describes. Device code that all families include:
``include/qcut/codebook/codebook.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.experts import EXPERT_PARAMS, SUM_PARAMS
from qcut.emitters.core.source import DType, EmitError, Param

BOOK_PARAMS = tuple(Param(f"book{i}", "i32") for i in range(8))
"""The codebook: 16 values of the products' 16-bit type (float16 for int8 products), two to a word, the first lower."""
PAIR_BOOK_PARAMS = tuple(Param(f"book{i}", "i32") for i in range(64))
"""A codebook of pairs: 64 pairs of positive values, one to a word, which stand for the same with other signs too."""
DENSE_TABLE_BYTES = 32_768
"""Shared memory of the dense table of pairs."""


@dataclass(frozen=True)
class CodebookProblem:
    """A product of rotated tokens with codebook weights.

    Attributes:
        x: element type of the tokens: f16, bf16 or s8.
        bits: of an index: 2, 3 or 4.
        slots: norms of a unit's row, 1, 2, 4 or 8: one for each 128, 64, 32 or 16 columns.
        epilogue: f16, bf16 or f32 output with per-channel scale; a row scale only with s8.
        alignment_n: elements that divide D's rows: its address, its leading dimension and n.
        rotates: type of one token as the model stores it, f16 or bf16, which the kernel itself rotates in Hadamard
            groups of a slot's columns, and quantizes if ``x`` is s8, bitwise as
            `qcut.emitters.codebook.rotate.RotateTokens` does; None: tokens were rotated before.
        row_norm: whether all norms of a row are one, and all rows have the same int8 values.
        offsets: whether each norm has an offset, which is added to values; with 16-bit tokens that were
            rotated before.
        pairs: whether the codebook is of pairs, so that a byte of 4-bit indices is the index of two values.
        experts: whether weights are those of experts, one after the other, and rows of D are routes; with tokens that
            were rotated before, without a residual.
        early_routes: whether an earlier kernel than the last one has written which routes there are, so that weights of
            experts are read before that one ends.
        summed: whether rows of D are tokens: the sums of their routes' results, each rounded to D's type and multiplied
            by the route's weight.
        mirrored: whether, of 16 values, value i is value 15 - i with the other sign, bit by bit, and values 0 to 7 have
            the sign bit; norms are at least 0. Tiles of int8 tokens may use that; the name does not have it.
    """

    x: DType = DType.F16
    bits: int = 4
    slots: int = 1
    epilogue: Epilogue = field(default_factory=lambda: Epilogue(col_scale="per_channel"))
    alignment_n: int = 8
    rotates: DType | None = None
    row_norm: bool = False
    offsets: bool = False
    pairs: bool = False
    experts: bool = False
    early_routes: bool = False
    summed: bool = False
    mirrored: bool = False

    def __post_init__(self) -> None:
        e = self.epilogue
        wanted = "per_token" if self.x is DType.S8 else "none"
        for holds, reason in (
            (self.x in (DType.F16, DType.BF16, DType.S8), f"tokens are {self.x.value}; allowed: f16, bf16, s8"),
            (self.bits in (2, 3, 4), f"indices of {self.bits} bits; allowed: 2, 3, 4"),
            (self.slots in (1, 2, 4, 8), f"{self.slots} norms a unit; allowed: 1, 2, 4, 8"),
            (e.out in (DType.F16, DType.BF16, DType.F32), f"output is {e.out.value}; allowed: f16, bf16, f32"),
            (e.col_scale == "per_channel", "the epilogue scales each channel"),
            (e.zero_point == "none", "tokens have no zero point"),
            (e.row_scale == wanted, f"row_scale is {e.row_scale}; {self.x.value} tokens take {wanted}"),
            (
                self.rotates in ((None, DType.F16, DType.BF16) if self.x is DType.S8 else (None, self.x)),
                f"rotates {self.rotates and self.rotates.value}; allowed: 16-bit floats; of 16-bit tokens, their type",
            ),
            (self.rotates is None or self.slots < 8, "rotates: groups of 32 columns or more, at most 4 norms a unit"),
            (
                not self.row_norm or (self.x is DType.S8 and self.slots == 1),
                "rows of one norm: s8 tokens, 1 norm a unit",
            ),
            (
                not self.offsets or (self.x is not DType.S8 and self.rotates is None),
                "offsets: 16-bit tokens, rotated before",
            ),
            (
                not self.pairs or (self.bits == 4 and not self.row_norm and not self.offsets),
                "pairs: 4 bits, norms that are read, no offsets",
            ),
            (
                not self.experts or (self.rotates is None and not self.row_norm and not e.residual),
                "experts: tokens rotated before, norms that are read, no residual",
            ),
            (not self.early_routes or self.experts, "early_routes: those to experts"),
            (not self.summed or self.experts, "summed: routes to experts"),
            (
                not self.mirrored or (self.x is DType.S8 and self.bits == 4 and not self.pairs),
                "mirrored: int8 tokens, 4 bits, no pairs",
            ),
        ):
            if not holds:
                raise EmitError(f"codebook problem: {reason}")

    @property
    def name(self) -> str:
        """``{x}xc{bits}s{slots}_{epilogue}_n{alignment_n}``; ``h`` or ``h{rotates}`` after x if the kernel rotates.

        Rows of one norm have ``r`` in place of ``s{slots}``, offsets ``o`` behind it, pairs ``p`` behind the bits,
        experts ``_e`` at the end, with early routes ``_ee``, summed ``s`` behind it.
        """
        x = self.x.value
        if self.rotates is not None:
            x += "h" if self.rotates is self.x else f"h{self.rotates.value}"
        norms = "r" if self.row_norm else f"s{self.slots}" + "o" * self.offsets
        weight = f"c{self.bits}{'p' * self.pairs}{norms}"
        routes = ("_ee" if self.early_routes else "_e") + "s" * self.summed if self.experts else ""
        return f"{x}x{weight}_{self.epilogue.name}_n{self.alignment_n}{routes}"

    def params(self) -> tuple[Param, ...]:
        """Arguments of a kernel, in order.

        ``x``: token blocks; if the kernel rotates, k elements that start at a multiple of 16 bytes, and ``signs`` of
        `qcut.numerics.codebook.tokens.operands`. ``units``, ``norms``: the weight. ``fold``: float32 for each padded
        row (s8 tokens only). ``d``: row-major, rows ``ldd`` elements apart. ``units_k``: units along K; if the kernel
        rotates,
        ``units_pass`` of them belong to a pass. The codebook and the epilogue's arguments follow, without ``row_scale``
        if the kernel quantizes; then `EXPERT_PARAMS` of experts, or `SUM_PARAMS` if they are summed.
        """
        fold = (Param("fold", "ptr", "const float*"),) if self.x is DType.S8 else ()
        rotates = self.rotates is not None
        signs = (Param("signs", "ptr", "const uint32_t*"),) if rotates else ()
        row = (Param("k", "i32"), Param("units_pass", "i32")) if rotates else ()
        return (
            Param("x", "ptr", "const char*" if self.rotates is None else f"const {self.rotates.cpp}*"),
            *signs,
            Param("units", "ptr", "const char*"),
            Param("norms", "ptr", "const char*"),
            *fold,
            Param("d", "ptr", f"{self.epilogue.out.cpp}*"),
            Param("m", "i32"),
            Param("n", "i32"),
            Param("units_k", "i32"),
            *row,
            Param("ldd", "i32"),
            *self.book_params,
            *(param for param in self.epilogue.params() if not (rotates and param.name == "row_scale")),
            *(SUM_PARAMS if self.summed else EXPERT_PARAMS if self.experts else ()),
        )

    @property
    def book_params(self) -> tuple[Param, ...]:
        """The words of the codebook."""
        return PAIR_BOOK_PARAMS if self.pairs else BOOK_PARAMS

    @property
    def book(self) -> str:
        """The statement that gathers the codebook's words."""
        words = ", ".join(f"static_cast<uint32_t>({word.name})" for word in self.book_params)
        return f"const qcut::{'PairBook' if self.pairs else 'Book'} book{{{{{words}}}}};"

    @property
    def norm_bytes(self) -> int:
        """Bytes of a unit's norms, with their offsets: two numbers for each slot of 16 rows."""
        return 32 * self.slots * (1 + self.offsets)

    @property
    def fold(self) -> str:
        """The pointer to ``fold`` in a call of device code."""
        return "fold" if self.x is DType.S8 else "nullptr"


ONE_WEIGHT = Constraint(
    "experts",
    "have no kernel of this family: all tokens take one weight",
    lambda problem, tile, arch: not problem.experts,
)
"""Constraint of families without products of experts; takes (problem, tile, arch)."""
ROTATED_BEFORE = Constraint(
    "rotates", "is None: tokens are rotated before", lambda problem, tile, arch: problem.rotates is None
)
"""Constraint of families that only take token blocks; takes (problem, tile, arch)."""
