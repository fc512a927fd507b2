"""The operators on codebook weights: rotate tokens, multiply them, do both for one token, and a whole layer.

A codebook weight lies in memory as *units* of 16 rows and 128 columns, see `qcut.numerics.codebook.layout`. Columns of
the weight are rotated group by group, and the operators rotate tokens in the same way. The second pass of a weight
follows the first along the columns.

The overload ``early_read`` (`qcut.ops.registry`) promises that the weight and the operands of the rotation are ready.
Codebook layers call this overload.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor

from qcut.errors import ConfigError, QuantizationError, ShapeError
from qcut.numerics.codebook import layout, pairs, products, rotation, tokens
from qcut.numerics.codebook.layout import UNIT_COLUMNS, UNIT_ROWS, Geometry
from qcut.numerics.codebook.quantizer import NORM_DTYPES, check_even
from qcut.ops.checks import F32, FLOAT_DTYPES, S8, check_dtype, check_k, check_tensor
from qcut.ops.linear import Int8LinearOp
from qcut.ops.registry import SYMBOLIC, operator
from qcut.schemes import K_MAX, LEAST_ROTATED_GROUP, check_activation, padded_k

TOKEN_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
KINDS = (*rotation.KINDS, rotation.NO_ROTATION)

_U8, _F16 = (torch.uint8,), (torch.float16,)


def can_rotate(kind: str, group_size: int, k: int) -> bool:
    """Whether kernels rotate rows that they hold: Hadamard groups of 32, 64 or 128 columns, all of one size."""
    geometry = Geometry(k, group_size, kind)
    return kind == "hadamard" and geometry.full == geometry.slot and k % geometry.full == 0


@operator("rotate_tokens", returns="(Tensor, Tensor)", layers=True)
class RotateTokensOp(NamedTuple):
    """Tokens rotated group by group, rounded to 16 bits or quantized by row, in the order in which products read them.

    The formula is `qcut.numerics.codebook.tokens.rotate_tokens`, the order of memory
    `qcut.numerics.codebook.layout.to_blocks`.

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K at least 1, of any strides.
        operands: signs or matrices of the rotation, as `qcut.numerics.codebook.tokens.operands` makes them, which
            kernels read; the CPU reads ``seeds``.
        kind: ``hadamard``, ``qr`` or ``none``.
        group_size: columns of a group; K or more takes whole rows.
        seeds: one for each pass, at least one.
        out_dtype: int8, or x's type if that has 16 bits.

    Returns:
        Blocks ``[passes * Kp / B, ceil(M / 8), 8, B]`` of ``out_dtype``, B = 128 bytes and Kp the padded columns of a
        pass, and scales: float32 ``[M]`` with int8, else ``[0]``.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: another kind, a group that the rotation cannot take, or no seed.

    Exactness: bitwise with ``hadamard`` and ``none``; ``qr`` sums float32 products in an order of the device.
    """

    x: Tensor
    operands: Tensor
    kind: str
    group_size: int
    seeds: list[int]
    out_dtype: torch.dtype
    early_read: bool = False

    def check(self) -> None:
        op, x = "rotate_tokens", self.x
        check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
        if x.dim() != 2 or x.shape[1] < 1:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
        _check_rotation(op, self.kind, x.shape[1], self.group_size, self.seeds)
        check_dtype(op, "out_dtype", self.out_dtype, TOKEN_DTYPES)
        if self.out_dtype is not torch.int8:
            name = str(self.out_dtype).removeprefix("torch.")
            check_dtype(op, f"x, with tokens of {name},", x.dtype, (self.out_dtype,))
        if self.kind != rotation.NO_ROTATION:
            kind = cast(rotation.Kind, self.kind)
            dtypes, shape = tokens.operand_layout(kind, self.group_size, int(x.shape[1]), x.dtype, len(self.seeds))
            check_tensor(op, "operands", self.operands, dtypes, shape, x.device)

    def fake(self) -> tuple[Tensor, Tensor]:
        (m, k), out_dtype = self.x.shape, self.out_dtype
        per_block = 128 // out_dtype.itemsize
        blocks = Geometry(k, self.group_size, self.kind).k_padded * len(self.seeds) // per_block
        scales = m if out_dtype is torch.int8 else 0
        return (
            self.x.new_empty((blocks, (m + 7) // 8, 8, per_block), dtype=out_dtype),
            self.x.new_empty((scales,), dtype=torch.float32),
        )

    def cpu(self) -> tuple[Tensor, Tensor]:
        x = self.x
        if len(x) == 0:
            return self.fake()
        kind = cast(rotation.Kind, self.kind)
        rows, scale = tokens.rotate_tokens(x, kind, self.group_size, tuple(self.seeds), self.out_dtype)
        return layout.to_blocks(rows), x.new_empty(0, dtype=torch.float32) if scale is None else scale


@operator("quantize_rotated", returns="(Tensor, Tensor)", layers=True)
class QuantizeRotatedOp(NamedTuple):
    """Rotates tokens by groups of columns, and rounds each to int8 with a scale of its own, ``max |r[m]| / 127``.

    r is the token after a Hadamard rotation with random signs. Results are the operands of ``int8_linear``.

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K from 1 to `qcut.schemes.K_MAX`, of any strides.
        operands: int32 signs of the rotation, as `qcut.numerics.codebook.tokens.operands` makes them, which kernels
            read; the CPU reads ``seed``.
        group_size: columns of a group, a power of two from `qcut.schemes.LEAST_ROTATED_GROUP` on, as the last group of
            fewer columns is; K or more takes whole rows.
        seed: of the signs.

    Returns:
        q, int8 ``[M, padded_k(K)]``, and its scales, float32 ``[M]``.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: a group that the rotation cannot take.
        QuantizationError: K beyond the exact range.

    Exactness: bitwise `qcut.numerics.codebook.tokens.quantize_rotated_ref`, on every device.
    """

    x: Tensor
    operands: Tensor
    group_size: int
    seed: int
    early_read: bool = False

    def check(self) -> None:
        op, x, size = "quantize_rotated", self.x, self.group_size
        check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
        if x.dim() != 2 or x.shape[1] < 1:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
        k = x.shape[1]
        check_k(op, k, K_MAX)
        if size < min(k, LEAST_ROTATED_GROUP):
            raise ConfigError(f"qcut::{op}: group_size is {size}; allowed: {LEAST_ROTATED_GROUP} and more")
        _check_rotation(op, "hadamard", k, size, [self.seed])
        dtypes, shape = tokens.operand_layout("hadamard", size, int(k), x.dtype, 1)
        check_tensor(op, "operands", self.operands, dtypes, shape, x.device)

    def fake(self) -> tuple[Tensor, Tensor]:
        m, k = self.x.shape
        q = self.x.new_empty((m, padded_k(k)), dtype=torch.int8)
        return q, self.x.new_empty((m,), dtype=torch.float32)

    def cpu(self) -> tuple[Tensor, Tensor]:
        return tokens.quantize_rotated_ref(self.x, self.group_size, self.seed, padded_k(self.x.shape[1]))


@operator("w8a8_rotated_linear", returns="Tensor", layers=True)
class W8A8RotatedLinearOp(NamedTuple):
    """`QuantizeRotatedOp` and ``int8_linear`` of one token in one launch, for rotations that `can_rotate` names.

    Args:
        x: float16 or bfloat16 ``[1, K]``, K a multiple of the group.
        operands: int32 signs of the rotation, as `qcut.numerics.codebook.tokens.operands` makes them, which kernels
            read; the CPU reads ``seed``.
        group_size: columns of a group: 32, 64 or 128, or K or more where K is one of those.
        seed: of the signs.
        qweight: int8 ``[N, K]``, N at least 1.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        y ``[1, N]`` of x's type, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: another group or activation.
        QuantizationError: K beyond the exact range.

    Exactness: bitwise the two operators one after the other.
    """

    x: Tensor
    operands: Tensor
    group_size: int
    seed: int
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    early_read: bool = False

    @property
    def rotation(self) -> QuantizeRotatedOp:
        """The first of the two operators that together compute the same."""
        return QuantizeRotatedOp(*self[:4], self.early_read)

    def product(self, q: Tensor, scale: Tensor) -> Int8LinearOp:
        """The second of them."""
        return Int8LinearOp(q, scale, *self[4:8], self.x.dtype, None, self.early_read)

    def check(self) -> None:
        op, x = "w8a8_rotated_linear", self.x
        if x.dim() != 2 or x.shape[0] != 1 or x.shape[1] < 1:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [1, K] with K >= 1")
        check_rotated(op, x, self.operands, self.group_size, [self.seed], torch.int8, in_rows=True)
        n = self.qweight.shape[0] if self.qweight.dim() == 2 else 0
        if n < 1:
            raise ShapeError(f"qcut::{op}: qweight has shape {list(self.qweight.shape)}; allowed: [N, K] with N >= 1")
        check_tensor(op, "qweight", self.qweight, S8, (n, x.shape[1]), x.device)
        check_tensor(op, "weight_scale", self.weight_scale, F32, (n,), x.device)
        if self.bias is not None:
            check_tensor(op, "bias", self.bias, F32, (n,), x.device)
        check_activation(self.activation)

    def fake(self) -> Tensor:
        return self.x.new_empty((1, self.qweight.shape[0]))

    def cpu(self) -> Tensor:
        return self.product(*self.rotation.cpu()).cpu()


@operator("codebook_gemm", returns="Tensor", layers=True)
class CodebookGemmOp(NamedTuple):
    """The product of rotated tokens with a codebook weight.

    With 16-bit tokens ``acc = sum_k x[m, k] * norm[n, slot(k)] * (value[idx[n, k]] + offset[n, slot(k)])``; with int8
    tokens acc is the int32 product with `qcut.numerics.codebook.layout.int8_weight`, times ``row_scale[m]``. Then
    ``y = rne(act(acc * col_scale[n] + bias[n]) + residual[m, n])``, rne rounding to the nearest value of ``out_dtype``.

    Args:
        x: blocks of tokens ``[128 U / B, ceil(m / 8), 8, B]``, B = 128 bytes, as `RotateTokensOp` makes them: float16,
            bfloat16 or int8.
        row_scale: float32 ``[m]`` of int8 tokens, else None.
        m: tokens.
        units: indices, uint8 ``[T, U, unit_bytes(bits)]``, T tiles of 16 rows, U units of 128 columns.
        norms: float16 ``[T, U, slots, 8, 2]``, 1, 2, 4 or 8 slots; with 16-bit tokens also ``[T, U, slots, 8, 4]``,
            offsets behind the norms as `qcut.numerics.codebook.layout.pack_offsets` puts them.
        fold: float32 ``[16 T]``, makes int8 of a row's weights, with int8 tokens; else None.
        col_scale: float32 ``[N]``, N at least 1.
        book: 8 words of two 16-bit values, or 64 for pairs, as `qcut.numerics.codebook.products.pack_book` makes them.
        bias: float32 ``[N]``; None: none is added.
        bits: of an index: 2, 3 or 4.
        activation: see `qcut.schemes.ACTIVATIONS`.
        residual: ``[m, N]`` of ``out_dtype``; None: none is added.
        out_dtype: float16, bfloat16 or float32.
        row_norm: the caller promises that all norms of a row are one, and that
            `qcut.numerics.codebook.products.has_one_table` holds for the codebook, with int8 tokens; not with pairs.
            Kernels then need not read ``norms`` and ``fold``.

    Returns:
        y ``[m, N]`` of ``out_dtype``, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: scales that do not go with the tokens' type, another book, number of bits or activation.
        QuantizationError: int8 tokens of more columns than int32 sums exactly.

    Exactness: bitwise with int8 tokens and the activations ``none`` and ``relu``. With 16-bit tokens a kernel is within
    float32 summation, and one 16-bit rounding of each weight, of the CPU, which sums in float64; with offsets, a
    second one, of ``norm * offset``.
    """

    x: Tensor
    row_scale: Tensor | None
    m: Annotated[int, SYMBOLIC]
    units: Tensor
    norms: Tensor
    fold: Tensor | None
    col_scale: Tensor
    book: list[int]
    bias: Tensor | None
    bits: int
    activation: str
    residual: Tensor | None
    out_dtype: torch.dtype
    row_norm: bool = False
    early_read: bool = False

    @property
    def tokens(self) -> torch.dtype:
        """Type of the rotated tokens."""
        return self.x.dtype

    @property
    def offsets(self) -> bool:
        """Whether norms have offsets."""
        return self.norms.shape[4] == 4

    def check(self) -> None:
        op, x, m = "codebook_gemm", self.x, self.m
        check_dtype(op, "x", x.dtype, TOKEN_DTYPES)
        per_block = 128 // x.element_size()
        shape, wanted = x.shape, ("kb", (m + 7) // 8, 8, per_block)
        if len(shape) != 4 or shape[1:] != wanted[1:] or shape[0] * per_block % UNIT_COLUMNS or not shape[0]:
            allowed = f"{list(wanted)}, whole units of 128 columns"
            raise ShapeError(f"qcut::{op}: x has shape {list(shape)}; allowed: {allowed}")
        units_k = shape[0] * per_block // UNIT_COLUMNS
        _check_product(op, self, m, units_k)
        is_int8 = x.dtype is torch.int8
        if self.row_norm and not (is_int8 and self.norms.shape[2] == 1 and not products.is_pair_book(self.book)):
            raise ConfigError(f"qcut::{op}: row_norm goes with int8 tokens, one norm a unit, and no pairs")
        rows = layout.row_tiles(self.col_scale.shape[0]) * UNIT_ROWS
        for name, vector, extent in (("row_scale", self.row_scale, m), ("fold", self.fold, rows)):
            if (vector is not None) != is_int8:
                raise ConfigError(f"qcut::{op}: {name} goes with int8 tokens, and only with them")
            if vector is not None:
                check_tensor(op, name, vector, F32, (extent,), x.device)
        if is_int8:
            _check_int8(op, units_k)

    def fake(self) -> Tensor:
        return self.x.new_empty((self.m, self.col_scale.shape[0]), dtype=self.out_dtype)

    def cpu(self) -> Tensor:
        x = self.x
        if self.m == 0:
            return self.fake()
        return products.codebook_gemm_ref(
            layout.from_blocks(x, self.m),
            self.row_scale,
            self.units,
            self.norms,
            self.fold,
            self.col_scale,
            products.unpack_book(self.book, torch.float16 if x.dtype is torch.int8 else x.dtype, x.device),
            self.bias,
            self.bits,
            self.activation,
            self.residual,
            self.out_dtype,
        )


@operator("codebook_gemv", returns="Tensor", layers=True)
class CodebookGemvOp(NamedTuple):
    """`RotateTokensOp` and `CodebookGemmOp` of one token in one launch, for rotations that `can_rotate` names.

    Args:
        x: float16 or bfloat16 ``[1, K]``, K a multiple of the group.
        operands: int32 ``[passes, K / 32]``, signs of the Hadamard rotation, as
            `qcut.numerics.codebook.tokens.operands` makes them.
        group_size: columns of a group: 32, 64 or 128, or K or more where K is one of those.
        seeds: one for each pass, at least one.
        units: indices, uint8 ``[T, U, unit_bytes(bits)]``, T tiles of 16 rows, U units of 128 columns, all passes.
        norms: float16 ``[T, U, 128 / group, 8, 2]``.
        fold: float32 ``[16 T]``, makes int8 of a row's weights: the token is multiplied as int8; None: as x's type.
        col_scale: float32 ``[N]``, N at least 1.
        book: 8 words of two 16-bit values, or 64 for pairs, as `qcut.numerics.codebook.products.pack_book` makes them:
            of float16 with ``fold``, else of x's type.
        bias: float32 ``[N]``; None: none is added.
        bits: of an index: 2, 3 or 4.
        activation: see `qcut.schemes.ACTIVATIONS`.
        residual: ``[1, N]`` of ``out_dtype``; None: none is added.
        out_dtype: float16, bfloat16 or float32.

    Returns:
        y ``[1, N]`` of ``out_dtype``, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: another group, no seed, another book, number of bits or activation.
        QuantizationError: int8 products of more columns than int32 sums exactly.

    Exactness: bitwise the two operators one after the other on the CPU; a kernel is near it as `CodebookGemmOp`'s is.
    """

    x: Tensor
    operands: Tensor
    group_size: int
    seeds: list[int]
    units: Tensor
    norms: Tensor
    fold: Tensor | None
    col_scale: Tensor
    book: list[int]
    bias: Tensor | None
    bits: int
    activation: str
    residual: Tensor | None
    out_dtype: torch.dtype
    early_read: bool = False

    @property
    def tokens(self) -> torch.dtype:
        """Type of the rotated token."""
        return self.x.dtype if self.fold is None else torch.int8

    @property
    def rotation(self) -> RotateTokensOp:
        """The rotation, first of the two operators that together compute the same."""
        return RotateTokensOp(
            self.x, self.operands, "hadamard", self.group_size, self.seeds, self.tokens, self.early_read
        )

    def product(self, blocks: Tensor, scale: Tensor) -> CodebookGemmOp:
        """The product of the rotation's blocks, second of the two operators that together compute the same."""
        row_scale = None if self.fold is None else scale
        return CodebookGemmOp(blocks, row_scale, 1, self.units, self.norms, *self[6:14], early_read=self.early_read)

    def check(self) -> None:
        op, x, group_size, passes = "codebook_gemv", self.x, self.group_size, len(self.seeds)
        check_dtype(op, "x", x.dtype, (torch.float16, torch.bfloat16))
        if x.dim() != 2 or x.shape[0] != 1 or x.shape[1] < 1:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [1, K] with K >= 1")
        geometry = Geometry(x.shape[1], group_size)
        _check_signs(op, self.operands, x, group_size, passes)
        _check_product(op, self, 1, passes * geometry.units)
        if self.fold is not None:
            _check_int8(op, passes * geometry.units)
            rows = layout.row_tiles(self.col_scale.shape[0]) * UNIT_ROWS
            check_tensor(op, "fold", self.fold, F32, (rows,), x.device)
        slots = UNIT_COLUMNS // geometry.slot
        if self.norms.shape[2] != slots:
            given = f"{self.norms.shape[2]} norms a unit"
            raise ShapeError(f"qcut::{op}: {given}; groups of {geometry.full} columns have {slots}")

    def fake(self) -> Tensor:
        return self.x.new_empty((1, self.col_scale.shape[0]), dtype=self.out_dtype)

    def cpu(self) -> Tensor:
        return self.product(*self.rotation.cpu()).cpu()


def check_rotated(
    op: str,
    x: Tensor,
    operands: Tensor,
    group_size: int,
    seeds: list[int],
    out: torch.dtype,
    in_rows: bool = False,
) -> None:
    """Check what an operator is given that rotates rows ``[M, K]`` before they are in memory.

    Raises:
        DtypeError, ShapeError, DeviceError: x is not float16 or bfloat16, ``out`` neither int8 nor x's type, or another
            than int8 in rows, or operands are not those of the rotation.
        ConfigError: no seed, several in rows, or a rotation that `can_rotate` does not name.
        QuantizationError: K beyond the exact range of products of int8 rows.
    """
    check_dtype(op, "x", x.dtype, (torch.float16, torch.bfloat16))
    check_dtype(op, "out_dtype, in rows," if in_rows else "out_dtype", out, (*(x.dtype,) * (not in_rows), torch.int8))
    _check_signs(op, operands, x, group_size, len(seeds))
    if in_rows:
        check_k(op, x.shape[1], K_MAX)
        if len(seeds) > 1:
            raise ConfigError(f"qcut::{op}: {len(seeds)} seeds; allowed: one, for rows of int8")


def rotation_of_rows(
    y: Tensor,
    operands: Tensor,
    group_size: int,
    seeds: list[int],
    out: torch.dtype,
    in_rows: bool,
    early_read: bool,
) -> RotateTokensOp | QuantizeRotatedOp:
    """The operator that rotates rows y as one does that rotates them before they are in memory."""
    if in_rows:
        return QuantizeRotatedOp(y, operands, group_size, seeds[0], early_read)
    return RotateTokensOp(y, operands, "hadamard", group_size, seeds, out, early_read)


@operator("codebook_linear", returns="Tensor", composed=True)
class CodebookLinearOp(NamedTuple):
    """A whole layer in plain torch on every device: the reference of `qcut.execution_path`.

    ``y = act(x @ W.T + bias)``, W the sum of one or two passes of rotated codebook weights. Passes of one width are one
    set of weights, passes of two widths are two.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K at least 1, of any strides.
        units: of each set, indices, uint8 ``[T, U, unit_bytes(bits)]``, T tiles of 16 rows, U units of 128 columns.
        packed_norms: of each set, float16 ``[T, U, slots, 8, 2]``, read with int8 products.
        fold: of each set, float32 ``[16 T]``, with int8 products; else an empty list, and products are float32.
        col_scale: of each set, float32 ``[N]``, read with int8 products.
        norms: float16 or float32 ``[N, passes * groups]``, as they were quantized, read with float32 products.
        codebooks: of each set, float32 ``[2**bits]``, or pairs, ``[256, 2]``, with 4 bits and even groups.
        bias: float32 ``[N]``; None: none is added.
        bits: of each set, the bits of an index.
        kind: ``hadamard``, ``qr`` or ``none``.
        group_size: columns of a group; K or more takes whole rows.
        seeds: one for each pass.
        activation: see `qcut.schemes.ACTIVATIONS`.

    Returns:
        y ``[..., N]`` of x's type, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: lists of other lengths, another kind or activation, a group that the rotation cannot take.

    Exactness: `qcut.numerics.codebook.products.codebook_linear_ref`, or ``codebook_linear_s8_ref`` with int8 products.
    """

    x: Tensor
    units: list[Tensor]
    packed_norms: list[Tensor]
    fold: list[Tensor]
    col_scale: list[Tensor]
    norms: Tensor
    codebooks: list[Tensor]
    bias: Tensor | None
    bits: list[int]
    kind: str
    group_size: int
    seeds: list[int]
    activation: str

    def check(self) -> None:
        op, x, seeds, device = "codebook_linear", self.x, self.seeds, self.x.device
        check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
        if x.dim() == 0 or x.shape[-1] < 1:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [..., K] with K >= 1")
        k = x.shape[-1]
        _check_rotation(op, self.kind, k, self.group_size, seeds)
        sets = len(self.units)
        parts = (self.packed_norms, self.col_scale, self.codebooks, self.bits)
        if sets not in (1, len(seeds)) or any(len(part) != sets for part in parts):
            raise ConfigError(f"qcut::{op}: {sets} sets of weights and {len(seeds)} passes; one of each, or one of all")
        if len(self.fold) not in (0, sets):
            raise ConfigError(f"qcut::{op}: {len(self.fold)} folds; allowed: {sets} with int8 products, else none")
        geometry, n = Geometry(k, self.group_size, self.kind), len(self.norms)
        tiles, units_k = layout.row_tiles(n), len(seeds) // sets * geometry.units
        slots = UNIT_COLUMNS // geometry.slot
        check_tensor(op, "norms", self.norms, NORM_DTYPES, (n, len(seeds) * geometry.groups), device)
        for units, packed_norms, col_scale, codebook, bits in zip(self.units, *parts, strict=True):
            in_pairs = check_set(op, units, codebook, bits, tiles, units_k, device)
            check_tensor(op, "packed_norms", packed_norms, _F16, (tiles, units_k, slots, 8, 2), device)
            check_tensor(op, "col_scale", col_scale, F32, (n,), device)
            if in_pairs:
                check_even(k, self.group_size, None)
        for fold in self.fold:
            check_tensor(op, "fold", fold, F32, (tiles * UNIT_ROWS,), device)
        if self.bias is not None:
            check_tensor(op, "bias", self.bias, F32, (n,), device)
        check_activation(self.activation)

    def fake(self) -> Tensor:
        return self.x.new_empty((*self.x.shape[:-1], len(self.norms)))

    def cpu(self) -> Tensor:
        x, kind = self.x, cast(rotation.Kind, self.kind)
        m, k = math.prod(x.shape[:-1]), x.shape[-1]
        if m == 0:
            return self.fake()
        rows = x.reshape(m, k)
        last = (self.bias, self.bits, kind, self.group_size, self.seeds, self.activation)
        if self.fold:
            y = products.codebook_linear_s8_ref(
                rows, self.units, self.packed_norms, self.fold, self.col_scale, self.codebooks, *last
            )
        else:
            y = products.codebook_linear_ref(rows, self.units, self.norms, self.codebooks, *last)
        return y.view(*x.shape[:-1], len(self.norms))


def check_set(
    op: str, units: Tensor, codebook: Tensor, bits: int, tiles: int, units_k: int, device: torch.device
) -> bool:
    """Check the indices and the codebook of a set of passes; returns whether the codebook is of pairs.

    Raises:
        DtypeError, ShapeError, DeviceError: they are not uint8 ``[tiles, units_k, unit_bytes(bits)]`` and float32
            ``[2**bits]``, or ``[256, 2]`` with 4 bits.
        ConfigError: another number of bits.
    """
    check_tensor(op, "units", units, _U8, (tiles, units_k, layout.unit_bytes(bits)), device)
    in_pairs = pairs.are_pairs(codebook) and bits == 4
    check_tensor(op, "codebook", codebook, F32, (pairs.COUNT, 2) if in_pairs else (1 << bits,), device)
    return in_pairs


def _check_rotation(op: str, kind: str, k: int, group_size: int, seeds: list[int]) -> None:
    if kind not in KINDS:
        raise ConfigError(f"qcut::{op}: kind is {kind!r}; allowed: {', '.join(KINDS)}")
    if kind != rotation.NO_ROTATION:
        rotation.check_group_size(k, group_size, kind)
    Geometry(k, group_size)
    if not seeds:
        raise ConfigError(f"qcut::{op}: no seed; allowed: one for each pass")


def _check_signs(op: str, operands: Tensor, x: Tensor, group_size: int, passes: int) -> None:
    """Check a rotation of rows ``[M, K]`` that `can_rotate` names."""
    k = x.shape[1]
    if not can_rotate("hadamard", group_size, k):
        allowed = "whole ones of 32, 64 or 128"
        raise ConfigError(f"qcut::{op}: groups of {group_size} of {k} columns; allowed: {allowed}")
    if not passes:
        raise ConfigError(f"qcut::{op}: no seed; allowed: one for each pass")
    check_tensor(op, "operands", operands, (torch.int32,), (passes, Geometry(k, group_size).k_padded // 32), x.device)


def _check_int8(op: str, units_k: int) -> None:
    if units_k * UNIT_COLUMNS > K_MAX:
        raise QuantizationError(
            f"qcut::{op}: {units_k * UNIT_COLUMNS} columns, padding included; int32 sums are exact to {K_MAX}"
        )


def _check_product(op: str, call: CodebookGemmOp | CodebookGemvOp, m: int, units_k: int) -> None:
    """Check all but the tokens of a product of m tokens and ``128 units_k`` columns."""
    device, norms = call.x.device, call.norms
    extent = call.col_scale.shape
    if len(extent) != 1 or not extent[0]:
        raise ShapeError(f"qcut::{op}: col_scale has shape {list(extent)}; allowed: [N] with N >= 1")
    n = extent[0]
    tiles = layout.row_tiles(n)
    check_tensor(op, "col_scale", call.col_scale, F32, (n,), device)
    check_tensor(op, "units", call.units, _U8, (tiles, units_k, layout.unit_bytes(call.bits)), device)
    slots = norms.shape[2] if norms.dim() == 5 else 0
    if slots not in (1, 2, 4, 8):
        allowed = f"[{tiles}, {units_k}, 1 or 2 or 4 or 8, 8, 2]"
        raise ShapeError(f"qcut::{op}: norms have shape {list(norms.shape)}; allowed: {allowed}")
    floats = isinstance(call, CodebookGemmOp) and call.tokens is not torch.int8
    width = 4 if floats and norms.shape[4] == 4 else 2
    check_tensor(op, "norms", norms, _F16, (tiles, units_k, slots, 8, width), device)
    if products.is_pair_book(call.book):
        if call.bits != 4 or width == 4:
            raise ConfigError(f"qcut::{op}: a book of pairs goes with 4 bits and without offsets; bits is {call.bits}")
    elif len(call.book) != 8:
        raise ConfigError(
            f"qcut::{op}: book has {len(call.book)} words; allowed: 8, of two 16-bit values each, or 64 for pairs"
        )
    if call.bias is not None:
        check_tensor(op, "bias", call.bias, F32, (n,), device)
    check_activation(call.activation)
    check_dtype(op, "out_dtype", call.out_dtype, FLOAT_DTYPES)
    if call.residual is not None:
        check_tensor(op, "residual", call.residual, (call.out_dtype,), (m, n), device)
