"""Kernels that rotate tokens by Hadamard matrices and store them as products read them, in blocks or in rows.

``r[g] = Pi_g x[g] * sqrt(d / d_g)`` for group g of d_g columns, where full groups have d columns and products divide
all groups by ``sqrt(d)``. Each pass has its own rotation; passes follow one another along K.
`qcut.numerics.codebook.layout` describes the layout of blocks, which codebook products read. Rows are for products with
int8 weights; their groups have no factor: ``r[g] = Pi_g x[g]``.

`qcut.emitters.codebook.rotate_dense` rotates by other matrices. Device code:
``include/qcut/codebook/rotate.cuh``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Literal

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include

Kind = Literal["hadamard", "none"]

LANE_COLUMNS = 16
_WARP_COLUMNS = 32 * LANE_COLUMNS
_MAX_THREADS = 1024
MAX_HADAMARD = _MAX_THREADS * LANE_COLUMNS
BLOCK_FLOATS = (DType.F16, DType.BF16)
"""16-bit types of tokens in blocks."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded_group(group: int, kind: str) -> int:
    """Columns that a full group of this size takes in memory: whole slots of 32, 64 or 128; or 16, of kind none."""
    slot = 16 if group <= 16 and kind == "none" else 32 if group <= 32 else 64 if group <= 64 else 128
    return _ceil_div(group, slot) * slot


def groups_aligned(group: int, x: DType) -> bool:
    """Whether groups of this size start at multiples of 16 bytes if rows do."""
    return group * x.bits % 128 == 0


def padded_columns(k: int, group: int, kind: str) -> int:
    """Columns of a row in memory, as `qcut.numerics.codebook.layout.Geometry.k_padded`."""
    full = padded_group(group, kind)
    slot = min(128, full)
    whole, last = divmod(k, group)
    return _ceil_div(whole * full + _ceil_div(last, slot) * slot, 128) * 128


def group_factor(group: int) -> str:
    """``float32(sqrt(d) / d)`` for groups of d columns, as a literal of C++."""
    return struct.unpack("f", struct.pack("f", math.sqrt(group) / group))[0].hex() + "f"


CONSTRAINTS = (
    Constraint(
        "kind", "is hadamard or none; matrices are RotateTokensDense's", lambda t: t.kind in ("hadamard", "none")
    ),
    Constraint("input", "is f16, bf16 or f32", lambda t: t.x in (*BLOCK_FLOATS, DType.F32)),
    Constraint(
        "output",
        "is s8, or the input's 16-bit type; either 16-bit type of f32",
        lambda t: t.out is DType.S8 or (t.out in BLOCK_FLOATS and t.x in (t.out, DType.F32)),
    ),
    Constraint("group", "has 1 column or more", lambda t: t.group >= 1),
    Constraint(
        "hadamard_group",
        f"is a power of two up to {MAX_HADAMARD}, the columns that a CTA holds",
        lambda t: t.kind == "none" or (t.group & (t.group - 1) == 0 and t.group <= MAX_HADAMARD),
    ),
    Constraint("passes", "are 1 or 2", lambda t: t.passes in (1, 2)),
    Constraint("threads", "are a multiple of 32 up to 1024", lambda t: t.threads in range(32, _MAX_THREADS + 1, 32)),
    Constraint("rows", "are 1 to 8, of 1024 threads at most", lambda t: 1 <= t.rows <= 8 and t.block <= _MAX_THREADS),
    Constraint("held", "is False only for int8 output: other rows are spread", lambda t: t.held or t.out is DType.S8),
    Constraint(
        "pieces",
        "of a row hold whole groups where it is read in pieces",
        lambda t: t.held or t.kind == "none" or t.row_columns % t.padded_group == 0,
    ),
    Constraint("natural", "is said of int8 columns", lambda t: t.out is DType.S8 or not t.natural),
    Constraint(
        "row_major",
        "is said of rotated int8 columns in natural order, of one pass, and not of routes",
        lambda t: not t.row_major or (t.kind == "hadamard" and t.natural and t.passes == 1 and not t.routed),
    ),
    Constraint(
        "aligned",
        "groups start at multiples of 16 bytes",
        lambda t: not t.aligned or groups_aligned(t.group, t.x),
    ),
)
"""Constraints of `RotateTokens`."""


@dataclass(frozen=True)
class RotateTokens(Kernel):
    """Hadamard rotations, or none, of all groups and passes in one launch.

    x ``[m, k]`` with a row stride in elements, in float32::

        hadamard  r[g] = walsh_hadamard(x[g] * signs[g]) * f32(sqrt(d) / d_g)
        none      r[g] = x[g]

    Output: blocks of 8 tokens x 128 bytes of r rounded once, or of ``q = clamp(rne(r / scale), -127, 127)`` with
    ``scale[m] = max|r| / 127`` over the row's passes (1 where that is 0; NaN and q = 0 where a row holds NaN or Inf).
    Padding is 0. Rows from m on in the last block of 8 are not written.

    If row-major, output is rows ``[m, k_padded]`` of q, and the factor of every group is ``f32(1 / sqrt(d_g))``.

    Attributes:
        x: element type of the input.
        out: s8, or a 16-bit float.
        kind: hadamard or none.
        group: columns of a full group, or of the row if the row is shorter. The last group may have fewer columns; for
            hadamard their number is a power of two, too.
        arch: real architecture.
        passes: rotations of the same columns, 1 or 2.
        threads: threads that share a row, or a part of a row if rows are spread over CTAs; each holds 16 columns.
        rows: rows of a CTA.
        held: whether the threads hold all the columns that their CTA writes. False: the CTA reads longer rows again
            after their maximum is known.
        aligned: rows of x, and groups of them, start at multiples of 16 bytes. False loads single elements.
        routed: rows of the blocks may be routes to experts, in any order, and several of one row of x. The next kernel
            begins when the last one has ended.
        natural: int8 columns lie in natural order, as those of int8 weights; False: in that of decoded codebooks.
        row_major: int8 columns lie in rows and not in blocks.

    Exactness: bitwise `qcut.numerics.codebook.tokens.rotate_tokens`; row-major, ``quantize_rotated_ref`` there.
    """

    x: DType
    out: DType
    kind: Kind
    group: int
    arch: str
    passes: int = 1
    threads: int = 256
    rows: int = 1
    held: bool = True
    aligned: bool = True
    routed: bool = False
    natural: bool = False
    row_major: bool = False

    constraints = CONSTRAINTS

    @classmethod
    def for_shape(
        cls,
        x: DType,
        out: DType,
        kind: Kind,
        arch: str,
        m: int,
        k: int,
        group_size: int,
        *,
        passes: int = 1,
        aligned: bool = True,
        sm_count: int = 132,
        routed: bool = False,
        natural: bool = False,
        row_major: bool = False,
    ) -> RotateTokens:
        """The kernel for m rows of k columns in groups of ``group_size``.

        Rows that need no maximum are spread over as many CTAs as the device has SMs and groups allow. Without a
        rotation, groups that need no padding are all the same kernel.

        Args:
            x: see `RotateTokens`, as for the arguments not listed.
            out: see `RotateTokens`.
            kind: see `RotateTokens`.
            arch: see `RotateTokens`.
            m: rows.
            k: columns.
            group_size: columns of a group; k or more takes whole rows.
            passes: see `RotateTokens`.
            aligned: rows start at multiples of 16 bytes; the function itself checks groups.
            sm_count: multiprocessors of the device.
            routed: see `RotateTokens`.
            natural: see `RotateTokens`.
            row_major: see `RotateTokens`.

        Raises:
            EmitError: see `CONSTRAINTS`.
        """
        group = min(group_size, k)
        columns = padded_columns(k, group, kind)
        if kind == "none" and (group == k or padded_group(group, kind) == group):
            group = 128
        aligned = aligned and groups_aligned(group, x)
        whole = min(_MAX_THREADS, _ceil_div(columns, _WARP_COLUMNS) * 32)
        held = True
        if out is DType.S8:
            held = columns <= whole * LANE_COLUMNS
            # A CTA that reads its row again gains more from registers than from threads.
            threads = whole if held or (kind == "hadamard" and group > 512 * LANE_COLUMNS) else 512
        else:
            # A CTA takes a whole number of groups; beyond a warp, 4 warps unless that leaves SMs without work.
            smallest = max(32, padded_group(group, kind) // LANE_COLUMNS) if kind == "hadamard" else 32
            spread = m * _ceil_div(columns, 4 * _WARP_COLUMNS) < sm_count
            threads = min(whole, smallest if spread else max(smallest, 128))
        rows = max(1, 128 // threads) if m >= 4 * sm_count else 1
        return cls(x, out, kind, group, arch, passes, threads, rows, held, aligned, routed, natural, row_major)

    @property
    def name(self) -> str:
        """``qcut_rotate_{arch}_{x}to{out}_{kind}{group}p{passes}_t{threads}r{rows}``.

        Then ``_loop`` (not held), ``_u`` (unaligned), ``_e`` (routed), ``_n`` (natural), ``_rows`` (row-major).
        """
        suffix = "_loop" * (not self.held) + "_u" * (not self.aligned) + "_e" * self.routed + "_n" * self.natural
        suffix += "_rows" * self.row_major
        return (
            f"qcut_rotate_{self.arch.replace('_', '')}_{self.x.value}to{self.out.value}_{self.kind}{self.group}"
            f"p{self.passes}_t{self.threads}r{self.rows}{suffix}"
        )

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.threads * self.rows

    @property
    def row_columns(self) -> int:
        """Columns that the threads of a row hold at once."""
        return self.threads * LANE_COLUMNS

    @property
    def padded_group(self) -> int:
        """Columns that a full group takes in memory."""
        return padded_group(self.group, self.kind)

    @property
    def smem_bytes(self) -> int:
        """Shared memory for butterflies that are wider than a warp's columns."""
        wide = self.kind == "hadamard" and self.group > _WARP_COLUMNS
        return self.block * LANE_COLUMNS * 4 if wide else 0

    def grid(self, m: int, k_padded: int) -> tuple[int, int, int]:
        """CTAs for m rows of k_padded columns a pass.

        Raises:
            EmitError: the row is longer than this kernel holds, or its pieces would cut a group.
        """
        pieces = _ceil_div(k_padded, self.row_columns) if self.held else 1
        if pieces > 1 and self.out is DType.S8:
            raise EmitError(f"{self.name}: {k_padded} columns; this kernel holds rows of up to {self.row_columns}")
        if pieces > 1 and self.kind == "hadamard" and self.row_columns % self.padded_group:
            raise EmitError(
                f"{self.name}: {k_padded} columns in pieces of {self.row_columns}, which cut groups of {self.group}"
            )
        return (_ceil_div(m, self.rows), pieces, 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``x``; ``y``: blocks, or rows; ``scale``: float32 ``[m]`` (s8 only); ``signs``: int32 words of each pass, those
        of `qcut.numerics.codebook.tokens.operands` (hadamard only); ``x_stride`` in elements, ``m``, ``k``,
        ``k_padded`` (of one pass; row-major, of a row of y). If routed, ``routes``: int32 ``[m]``, routes from 0 to
        ``total - 1``; of other numbers blocks are left as they are, and ``scale``, which is that of routes, has none;
        null: rows are those of x. ``per_row``: routes of a row of x.
        """
        return (
            Param("x", "ptr", f"const {self.x.cpp}*"),
            Param("y", "ptr", "void*"),
            *(Param("scale", "ptr", "float*"),) * (self.out is DType.S8),
            *(Param("signs", "ptr", "const uint32_t*"),) * (self.kind == "hadamard"),
            Param("x_stride", "i64"),
            Param("m", "i32"),
            Param("k", "i32"),
            Param("k_padded", "i32"),
            *(Param("routes", "ptr", "const int*"), Param("per_row", "i32"), Param("total", "i32")) * self.routed,
        )

    def emit(self) -> KernelSource:
        """Text of the kernel.

        The previous kernel may write x (programmatic dependent launch); all other inputs are read before its end.
        """
        params = self.params()
        flags = ", ".join(map(flag, (self.held, self.aligned, self.natural, self.row_major)))
        template = (
            f"{self.x.cpp}, {self.out.cpp}, {flag(self.kind == 'hadamard')}, {self.group}, {self.padded_group}, "
            f"{self.passes}, {self.threads}, {self.rows}, {flags}"
        )
        pointers = call_arguments(("scale", "signs"), params)
        run, routes = ("run<true>", ", routes, per_row, total") if self.routed else ("run", "")
        return self._source(
            f"qcut::RowRotation<{template}>::{run}"
            f"(x, y, {pointers}, x_stride, m, k, k_padded, {group_factor(self.group)}{routes});",
            device_code=include("codebook/rotate.cuh"),
            # Without the bound of one CTA to an SM, ptxas spills a word of the loop to fit two.
            ctas_per_sm=None if self.held else 1,
            smem_bytes=self.smem_bytes,
        )
