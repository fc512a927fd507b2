"""W8A8 for few tokens, bound by memory, on ``mma.sync.m16n8k32``, with int8 weights in the layout of the int8 GEMMs.

Tokens are int8, or rows of floats that the kernel quantizes as it loads them, by largest magnitudes that the previous
kernel stored. Device code: ``include/qcut/stream/w8a8.cuh``, and ``int16x8.cuh`` for int16 tokens as a hi/lo split (its
two sums are combined before warps add theirs); ``integers.cuh`` if the epilogue rescales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcut.emitters.codebook.rotate import BLOCK_FLOATS, group_factor
from qcut.emitters.codebook.rotate_rows import GROUPS
from qcut.emitters.core.constraints import ARCHITECTURE, CLUSTERS, SPLITS, Constraint, shared_memory
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.experts import EXPERT_PARAMS, tile_rows
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.core.text import flag, include, kernel_source
from qcut.emitters.gemm.problem import K_MAX
from qcut.emitters.stream.family import StreamFamily
from qcut.emitters.stream.int8 import CUT_CONSTRAINTS, ROUTE_REGISTERS, Int8StreamTile, register_limit

MAX_TOKENS = 32
"""Largest number of int8 tokens that registers hold with the weights in flight."""
MAX_ROWS = 8
"""Largest number of rows that a kernel quantizes, and of int16 tokens: the columns of one product."""
Tokens = Literal["none", "given", "rows", "floats"]

_TOKENS = (1, 2, 4, 8, 16, 32)
_FLOATS = (DType.F16, DType.BF16, DType.F32)
_OTHER_REGISTERS = 36
"""Registers of a thread for addresses, counters, bounds and a token in flight."""
_OTHER_REGISTERS_INT8 = 24
"""Registers of a thread for addresses, counters and bounds, with several tiles of int8 tokens."""
_NEEDS_MORE = ("sm_100", "sm_120")
"""Architectures on which quantizing eight rows needs more registers: without them, the compiler spills."""


@dataclass(frozen=True)
class W8A8Problem:
    """The types, tokens and epilogue of one product; sizes are known at launch.

    Attributes:
        tokens: ``none``: int8 ``a`` and ``row_scale``. ``given``: int8 ``a`` and ``row_scale``, and weights that the
            previous kernel does not write. ``rows``: rows of type x with their largest magnitudes ``a_absmax``, which
            the kernel quantizes as `qcut.emitters.decoder.quantize.QuantizePerToken` does, with weights as for
            ``given``. ``floats``: rows; the kernel finds their largest magnitudes.
        x: element type of rows; unused by int8 tokens.
        epilogue: one with a scale for each token and each channel, or one that rescales: tokens are then ``none`` or
            ``given``, without scales, and with halves rows of int16.
        aligned: addresses and strides of rows are multiples of 16 bytes.
        absmax: whether ``absmax``, float32 ``[m]``, is raised to the largest magnitude of each row of D; NaN counts
            as the largest.
        experts: whether b is the weights of experts, one after the other, and rows of D are routes.
        rotates: columns of a group of the Hadamard rotation that the kernel applies to its one token before it finds
            the largest magnitude, bitwise as `qcut.emitters.codebook.rotate.RotateTokens` row-major; 0: none.
    """

    tokens: Tokens
    x: DType
    epilogue: Epilogue
    aligned: bool = True
    absmax: bool = False
    experts: bool = False
    rotates: int = 0

    @property
    def name(self) -> str:
        """``{tokens}_{epilogue}``, with type and group of rows before; ``_absmax``, ``_u`` if unaligned, ``_e``."""
        rows = f"_{self.x.value}" * self.quantizes + f"_h{self.rotates}" * (self.rotates > 0)
        flags = f"{'_absmax' * self.absmax}{'' if self.aligned else '_u'}{'_e' * self.experts}"
        return f"{self.tokens}{rows}_{self.epilogue.name}{flags}"

    @property
    def quantizes(self) -> bool:
        """Whether the kernel quantizes tokens."""
        return self.tokens in ("rows", "floats")

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: those of a `GemmProblem`, ``absmax``, ``activation``, `EXPERT_PARAMS`, where needed.

        int8 and int16 rows of a are multiples of 16 bytes apart. ``rows`` have ``a_absmax`` in place of ``row_scale``,
        ``floats`` neither. A rotation has ``signs`` after the sizes, those of ``RotateTokens``. With halves,
        ``tokens`` is the number of tokens, and m is unused; with experts as well, m counts routes, and ``tokens`` is
        unused.
        """
        sizes = ("m", "n", "k", "lda", "ldb", "ldd")
        scaling = self.epilogue.params()
        if self.quantizes:
            scaling = tuple(p for p in scaling if p.name != "row_scale")
        if self.tokens == "rows":
            scaling = (Param("a_absmax", "ptr", "const float*"), *scaling)
        return (
            Param("a", "ptr", "const void*"),
            Param("b", "ptr", "const int8_t*"),
            Param("d", "ptr", f"{self.epilogue.out.cpp}*"),
            *(Param(size, "i32") for size in sizes),
            *(Param("signs", "ptr", "const uint32_t*"),) * (self.rotates > 0),
            *(param for param in scaling if param.name != "activation"),
            *(Param("absmax", "ptr", "float*"),) * self.absmax,
            *(param for param in scaling if param.name == "activation"),
            *EXPERT_PARAMS * self.experts,
        )


@dataclass(frozen=True)
class W8A8Tile(Int8StreamTile):
    """An `Int8StreamTile` with 1, 2, 4, 8, 16 or 32 ``tokens``.

    Attributes:
        common_sums: whether the warps add their sums to one set in shared memory, in place of a set for each.
    """

    common_sums: bool = False

    @property
    def name(self) -> str:
        """The name of an `Int8StreamTile`, and ``_c`` with common sums."""
        return super().name + "_c" * self.common_sums


def smem_bytes(problem: W8A8Problem, tile: W8A8Tile) -> int:
    """Dynamic shared memory of a CTA.

    Rows of weights have a scale, a bias and a sum; tokens a scale, a zero point and a largest magnitude. The sums of
    the warps follow, and before them the largest magnitudes that each warp finds of up to eight tokens. Sums of tokens
    in halves have 64 bits. Where results are rescaled, rows have a bias, a multiplier and a shift, and the CTA a zero
    point.
    """
    rows, sets = 16 * tile.row_tiles, 1 if tile.common_sums else tile.warps
    sums = (8 if problem.epilogue.halves else 4) * sets * tile.tokens * (rows + 4)
    if problem.epilogue.rescale:
        return 16 * rows + 16 + sums
    found = -(-tile.warps * tile.tokens // 4) * 16 if tile.tokens <= MAX_ROWS else 0
    return 12 * rows + 12 * max(8, tile.tokens) + found + sums


def registers(problem: W8A8Problem, tile: W8A8Tile, arch: str) -> int:
    """Estimate a thread's registers: weights in flight, tokens, sums, and the rest."""
    # Rows of 16-bit floats are quantized in the registers into which they were loaded.
    tokens = (16 if problem.quantizes and problem.x is DType.F32 else 8) * tile.units
    more = 16 * tile.units if arch in _NEEDS_MORE and problem.quantizes and tile.tokens == 8 else 0
    tiles = -(-tile.tokens // 8)
    more += 8 if arch in _NEEDS_MORE and tiles > 1 else 0
    if problem.epilogue.halves:  # of each token two halves, and sums of theirs; a single row leaves room for them
        one = problem.tokens == "floats" and tile.tokens == 1
        more += 24 * (tile.units - 1) + (16 if arch in _NEEDS_MORE else 0 if one else 8)
    more += ROUTE_REGISTERS * problem.experts * (1 + problem.quantizes)
    other = _OTHER_REGISTERS if tiles == 1 else _OTHER_REGISTERS_INT8
    return 16 * tile.units * tile.prefetch + tiles * (tokens + 4) + other + more


CONSTRAINTS = (
    Constraint(
        "x",
        "is f16, bf16 or f32 where the kernel quantizes",
        lambda p, t, arch: p.x in _FLOATS or not p.quantizes,
    ),
    Constraint(
        "epilogue",
        "scales channels, and has a residual only with rows",
        lambda p, t, arch: (
            (p.epilogue.col_scale == "per_channel" or p.epilogue.rescale)
            and (not p.epilogue.residual or p.tokens == "rows")
        ),
    ),
    Constraint(
        "rescale",
        "is of tokens that are integers already, without their results' largest magnitudes",
        lambda p, t, arch: not p.epilogue.rescale or not (p.quantizes or p.absmax),
    ),
    Constraint(
        "rows",
        "that the kernel quantizes have a scale each and no zero point, and are 8 at most",
        lambda p, t, arch: (
            not p.quantizes
            or ((p.epilogue.row_scale, p.epilogue.zero_point) == ("per_token", "none") and t.tokens <= MAX_ROWS)
        ),
    ),
    Constraint(
        "absmax",
        "is that of f16, bf16 or f32",
        lambda p, t, arch: p.epilogue.out in _FLOATS or (p.epilogue.out in (DType.S8, DType.S16) and not p.absmax),
    ),
    Constraint(
        "experts",
        "have int8 tokens or rows with a scale each, and neither absmax nor a residual; halves are of rows",
        lambda p, t, arch: (
            not p.experts
            or (
                p.tokens in (("rows",) if p.epilogue.halves else ("none", "rows"))
                and (p.epilogue.row_scale, p.epilogue.zero_point) == ("per_token", "none")
                and not (p.epilogue.residual or p.absmax)
            )
        ),
    ),
    Constraint(
        "rotates",
        f"is 0, or one of {GROUPS} for one aligned token of 16-bit floats without halves and experts",
        lambda p, t, arch: (
            p.rotates == 0
            or (
                (p.tokens, t.tokens, p.aligned) == ("floats", 1, True)
                and p.rotates in GROUPS
                and p.x in BLOCK_FLOATS
                and not (p.epilogue.halves or p.experts)
            )
        ),
    ),
    ARCHITECTURE,
    Constraint("tokens", f"are one of {_TOKENS}", lambda p, t, arch: t.tokens in _TOKENS),
    Constraint(
        "halves",
        f"are of {MAX_ROWS} tokens at most, and their sums those of a CTA's warps, a set for each",
        lambda p, t, arch: not p.epilogue.halves or (t.tokens <= MAX_ROWS and t.splits == 1 and not t.common_sums),
    ),
    *CUT_CONSTRAINTS,
    Constraint(
        "registers",
        f"weights in flight, tokens, sums and {_OTHER_REGISTERS} more fit a thread's 255 and the SM's 65536",
        lambda p, t, arch: registers(p, t, arch) <= register_limit(t.warps),
    ),
    SPLITS,
    CLUSTERS,
    shared_memory("sums fit what the architecture gives a CTA", smem_bytes),
)
"""Constraints of the family; each takes (problem, tile, arch)."""


def tokens_of(problem: W8A8Problem, m: int, k: int) -> int:
    """Tokens that a tile holds for m tokens of k columns.

    Raises:
        EmitError: m is more than `MAX_TOKENS`, or than `MAX_ROWS` where the kernel quantizes or tokens are in halves,
            or K beyond the exact range.
    """
    most = MAX_ROWS if problem.quantizes or problem.epilogue.halves else MAX_TOKENS
    if not 1 <= m <= most:
        raise EmitError(f"{INT8_STREAM.name}: {m} tokens; allowed are 1 to {most}")
    if not 1 <= k <= K_MAX:
        raise EmitError(f"{INT8_STREAM.name}: K is {k}; allowed is 1 to {K_MAX}")
    return next(size for size in _TOKENS if m <= size)


class Int8Stream(StreamFamily[W8A8Problem, W8A8Tile]):
    """Few int8 tokens, or rows that the kernel quantizes, and int8 weights.

    Arguments are ``problem.params()`` in order; 1 <= m <= ``tile.tokens``; k is a multiple of 16 unless the kernel
    quantizes. b: int8 ``[n, ldb]``, 16-byte aligned, ldb a multiple of 16 and at least k, zero from k on. D is stored
    element by element. Unless tokens are ``none``, b and the vectors of n are read before the kernel waits for its
    predecessor. With experts, everything is read after it, and m counts the routes of all tiles, ``tile.tokens`` each;
    a route's row of D is written, and no other.

    Exactness: integer sums are exact, and the epilogue is that of the other int8 GEMMs, bitwise.

    Source: PTX ISA, ``mma.sync.m16n8k32``, ``ld.global.nc``, ``griddepcontrol``, ``barrier.cluster``.
    """

    name = "int8_stream"
    tile_type = W8A8Tile
    constraints = CONSTRAINTS
    smem_bytes = staticmethod(smem_bytes)

    def _source(self, name: str, problem: W8A8Problem, tile: W8A8Tile, arch: str) -> KernelSource:
        tokens = f"qcut::Tokens::k{problem.tokens.capitalize()}"
        a_absmax = "a_absmax" if problem.tokens == "rows" else "nullptr"
        absmax = "absmax" if problem.absmax else "nullptr"
        params, halves, rescale = problem.params(), problem.epilogue.halves, problem.epilogue.rescale
        function, m = "int16x8_stream" if halves else "int8_stream", "tokens" if halves and not problem.experts else "m"
        header = "int16x8" if halves else "w8a8"
        rows = f", {tile_rows(tile.tokens)}" if problem.experts else ""
        if problem.rotates:
            header = "w8a8_rotated"
            factor = group_factor(problem.rotates)
            rows = f", qcut::AllRows(), qcut::TokenRotation<{problem.rotates}>{{signs, {factor}}}"
        using_tile = f"using Tile = qcut::W8A8Tile<{problem.x.cpp}, {tokens}, {flag(tile.common_sums)}, {tile.sizes}>;"
        call = (
            f"qcut::{function}<Tile, {flag(problem.aligned)}, {flag(problem.absmax)}, Epilogue>(\n"
            f"      a, {a_absmax}, b, d, {absmax}, {m}, n, k, lda, ldb, ldd, args{rows});"
        )
        if rescale:
            header = "integers"
            flags = f"{flag(problem.tokens == 'none')}, {flag(tile.common_sums)}"
            using_tile = f"using Tile = qcut::IntegerTile<{flags}, {tile.sizes}>;"
            call = f"qcut::integer_stream<Tile, {flag(halves)}, Epilogue>(a, b, d, {m}, n, k, lda, ldb, ldd, args);"
        return kernel_source(
            name,
            arch,
            params,
            using_tile,
            *problem.epilogue.statements(params, whole_sums=True),
            call,
            device_code=include(f"stream/{header}.cuh"),
            block=32 * tile.warps,
            ctas_per_sm=1,
            waits=True,
            smem_bytes=smem_bytes(problem, tile),
            cluster=tile.splits,
        )


INT8_STREAM = Int8Stream()


def is_legal(problem: W8A8Problem, m: int, k: int, arch: str) -> bool:
    """Whether there is a kernel for m tokens of k columns, for any N and number of SMs."""
    try:
        INT8_STREAM.validate(problem, W8A8Tile(1, 1, tokens=tokens_of(problem, m, k)), arch)
    except EmitError:
        return False
    return True
