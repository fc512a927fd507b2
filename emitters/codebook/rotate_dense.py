"""Kernels that rotate tokens by dense matrices and store them in the layout of the codebook products.

``r[g] = Pi_g x[g] * sqrt(d / d_g)`` for group g of d_g columns, where full groups have d columns, as in
`qcut.emitters.codebook.rotate`. int8 tokens take two launches: `RotateTokensDense` with float32
output, then `qcut.emitters.codebook.rotate.RotateTokens` of kind ``none`` on those rows. Device code:
``include/qcut/codebook/rotate_dense.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.codebook.rotate import BLOCK_FLOATS, groups_aligned, padded_group
from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import flag

MAX_DENSE = 1024
"""Columns of a group."""

CONSTRAINTS = (
    Constraint("input", "is f16 or bf16: what tensor cores multiply", lambda t: t.x in BLOCK_FLOATS),
    Constraint("output", "is blocks of the input's type, or rows of f32", lambda t: t.out in (t.x, DType.F32)),
    Constraint(
        "group",
        f"has 1 to {MAX_DENSE} columns: work and matrices grow with its square; larger groups take hadamard",
        lambda t: 1 <= t.group <= MAX_DENSE,
    ),
    Constraint("passes", "are 1 or 2", lambda t: t.passes in (1, 2)),
    Constraint("tokens", "are 16, 32 or 64 in a CTA", lambda t: t.tokens in (16, 32, 64)),
    Constraint(
        "aligned",
        "groups start at multiples of 16 bytes",
        lambda t: not t.aligned or groups_aligned(t.group, t.x),
    ),
)
"""Constraints of `RotateTokensDense`."""


@dataclass(frozen=True)
class RotateTokensDense(Kernel):
    """Rotations by matrices, all groups and passes in one launch, on ``mma.sync.m16n8k16``.

    ``r[m, j] = sum_i x[m, i] * q[pass, g, j, i]`` for each group g of x ``[m, k]`` (a row stride in elements), q the
    16-bit matrices of `qcut.numerics.codebook.tokens.operands`, which hold the factor ``sqrt(d / d_g)``. Sums are
    float32.

    Output: blocks of 8 tokens x 128 bytes of r rounded once, or rows ``[m, passes * k_padded]`` of float32. In blocks,
    padding is 0, and rows from m on in the last block of 8 are not written.

    Attributes:
        x: f16 or bf16, also q's type.
        out: x's type, or f32.
        group: columns of a full group (the row's, where that has fewer), 1 to 1024; the last may have fewer.
        arch: real architecture.
        passes: rotations of the same columns, 1 or 2.
        tokens: of a CTA, 16, 32 or 64.
        aligned: rows of x, and groups of them, start at multiples of 16 bytes. False loads single elements.

    Exactness: that of float32 sums of d exact products, at most ``2**-23 * d * sum_i |x q|`` off before the output's
    rounding, in an order that depends only on d. A token's result does not depend on the other tokens.
    """

    x: DType
    out: DType
    group: int
    arch: str
    passes: int = 1
    tokens: int = 64
    aligned: bool = True

    constraints = CONSTRAINTS

    @classmethod
    def for_shape(
        cls, x: DType, out: DType, arch: str, m: int, k: int, group_size: int, *, passes: int = 1, aligned: bool = True
    ) -> RotateTokensDense:
        """The kernel for m rows of k columns in groups of ``group_size``.

        Raises:
            EmitError: see `CONSTRAINTS`.
        """
        group = min(group_size, k)
        tokens = 16 if m <= 16 else 32 if m <= 32 else 64
        return cls(x, out, group, arch, passes, tokens, aligned and groups_aligned(group, x))

    @property
    def name(self) -> str:
        """``qcut_rotate_{arch}_{x}to{out}_qr{group}p{passes}_m{tokens}``, and ``_u`` where rows are unaligned."""
        return (
            f"qcut_rotate_{self.arch.replace('_', '')}_{self.x.value}to{self.out.value}_qr{self.group}"
            f"p{self.passes}_m{self.tokens}{'' if self.aligned else '_u'}"
        )

    @property
    def padded_group(self) -> int:
        """Columns that a full group takes in memory."""
        return padded_group(self.group, "qr")

    @property
    def columns(self) -> int:
        """Columns of a CTA, in one group."""
        return min(64, self.padded_group)

    @property
    def block(self) -> int:
        """Threads of a CTA: each warp has 16 tokens and 16 columns at least."""
        along_m = self.tokens // 16
        return 32 * along_m * min(4 // along_m, self.columns // 16)

    def grid(self, m: int, k_padded: int) -> tuple[int, int, int]:
        """CTAs for m rows of k_padded columns a pass."""
        return (-(-m // self.tokens), k_padded // self.columns, self.passes)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: ``x, y, q, x_stride, m, k, k_padded`` (of one pass)."""
        return (
            Param("x", "ptr", f"const {self.x.cpp}*"),
            Param("y", "ptr", "void*"),
            Param("q", "ptr", f"const {self.x.cpp}*"),
            Param("x_stride", "i64"),
            Param("m", "i32"),
            Param("k", "i32"),
            Param("k_padded", "i32"),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel.

        The previous kernel may write x (programmatic dependent launch); q is read before its end.
        """
        sizes = f"{self.group}, {self.padded_group}, {self.tokens}, {self.columns}, {flag(self.aligned)}"
        return self._call(f"rotate_dense<{self.x.cpp}, {self.out.cpp}, {sizes}>", "codebook/rotate_dense.cuh")
