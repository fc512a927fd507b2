"""`qcut.ops.codebook` in Triton: weights are read in the CUDA kernels' order, and decoded tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.backends.triton import launch as runtime
from qcut.backends.triton.int8 import int8_linear
from qcut.backends.triton.kernels import codebook as kernels
from qcut.backends.triton.kernels import rotate as rotations
from qcut.numerics.codebook import products
from qcut.numerics.codebook.layout import Geometry
from qcut.ops.codebook import CodebookGemmOp, CodebookGemvOp, QuantizeRotatedOp, RotateTokensOp, W8A8RotatedLinearOp
from qcut.ops.registry import serves

_HALF_COLUMNS = 2048
"""Columns that one program rotates at a time, where no quantization needs the whole token."""
_FEW = 64
"""Most tokens that do not fill a GPU with programs of their own."""
_MOST_COLUMNS = 16_384
"""Columns that one program can hold."""


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        rows: tokens of a program.
        columns: output channels of a program, a multiple of 16.
        transposed: whether weights have the rows of the tensor core's tile.
        warps: of a program.
        stages: steps with loads under way.
        parts: programs that share the columns of the weight, for weights of few rows.
        group: tiles of rows that take turns on the columns.
    """

    rows: int
    columns: int
    transposed: bool
    warps: int
    stages: int
    parts: int = 1
    group: int = 8


def tiles_of(m: int) -> Sequence[Tile]:
    """The tiles to choose from for m tokens, the likeliest first."""
    if m <= 64:
        rows = 16 if m <= 16 else 32 if m <= 32 else 64
        return [
            Tile(rows, 64, True, 4, 4),
            Tile(rows, 64, True, 4, 4, 2),
            Tile(rows, 64, True, 4, 4, 4),
            Tile(rows, 64, True, 4, 5, 8),
            Tile(rows, 128, True, 8, 3),
        ]
    if m <= 256:
        return [
            Tile(128, 64, True, 4, 3),
            Tile(128, 64, True, 4, 3, 2),
            Tile(128, 64, True, 4, 3, 4),
            Tile(128, 128, True, 8, 3),
            Tile(64, 64, True, 4, 4, 4),
        ]
    return [
        Tile(256, 128, True, 8, 3),
        Tile(128, 128, False, 4, 2),
        Tile(256, 128, True, 8, 2),
        Tile(128, 64, True, 4, 3),
        Tile(256, 128, False, 8, 2),
    ]


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────


@serves(RotateTokensOp, "triton")
def rotate_tokens(call: RotateTokensOp) -> tuple[Tensor, Tensor]:
    call.check()
    runtime.require_device(call.x.device)
    return _rotate(call)


def _rotate(call: RotateTokensOp) -> tuple[Tensor, Tensor]:
    x, (m, k), passes = call.x, call.x.shape, len(call.seeds)
    if m == 0:
        return call.fake()
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    geometry = Geometry(k, call.group_size, call.kind)
    full, in_order = geometry.full, geometry.padded_group == geometry.full
    with runtime.on(x.device):
        if call.kind == "qr":
            rows = _turned(x, call.operands.contiguous(), geometry, passes)
            return _blocks(call, rows, passes * geometry.k_padded, passes * geometry.k_padded, 0, 1.0)
        if call.kind == "none" and in_order:
            # The columns of all passes are the same: each is read at its place in its pass.
            return _blocks(call, x, geometry.k_padded, passes * geometry.k_padded, 0, 1.0)
        if call.kind == "hadamard" and in_order and k % full == 0 and full <= _MOST_COLUMNS:
            factor = math.sqrt(full) / full
            return _blocks(call, x, geometry.k_padded, passes * geometry.k_padded, full.bit_length() - 1, factor)
    # Groups of few or of very many columns, or a shorter last one: torch's operations, of the tokens' size.
    return call.cpu()


@serves(QuantizeRotatedOp, "triton")
def quantize_rotated(call: QuantizeRotatedOp) -> tuple[Tensor, Tensor]:
    call.check()
    runtime.require_device(call.x.device)
    x, (m, k), full = call.x, call.x.shape, min(call.group_size, call.x.shape[1])
    if m == 0:
        return call.fake()
    if k % full or full > _MOST_COLUMNS:
        return call.cpu()  # as in `_rotate`
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    q, scale = call.fake()
    width, factor = q.shape[1], math.sqrt(full) / full
    columns, warps = _whole_token(full, width, m)
    with runtime.on(x.device):
        rotations.to_int8[(m,)](
            x,
            call.operands.contiguous(),
            q,
            scale,
            *(x.stride(0) if m > 1 else k, m, k, width, width, 0, factor),
            COLUMNS=columns,
            STAGES=full.bit_length() - 1,
            ONCE=columns >= width,
            ROWS=True,
            num_warps=warps,
        )
    return q, scale


@serves(W8A8RotatedLinearOp, "triton")
def w8a8_rotated_linear(call: W8A8RotatedLinearOp) -> Tensor:
    call.check()
    return int8_linear(call.product(*quantize_rotated(call.rotation)))


def _whole_token(group: int, width: int, m: int) -> tuple[int, int]:
    """Columns that a program holds of a token of some width, and its warps, if it quantizes the token."""
    columns = min(max(group, 1 << (width - 1).bit_length()), _MOST_COLUMNS)
    # Few tokens are few programs: more threads shorten them. Many tokens are done sooner with less to exchange.
    return columns, min(32, max(1, columns // (256 if m <= _FEW else 1024)))


def _blocks(
    call: RotateTokensOp, x: Tensor, k_padded: int, width: int, stages: int, factor: float
) -> tuple[Tensor, Tensor]:
    """Rotate rows and put them in blocks; ``stages`` is the logarithm of a Hadamard group, 0 for no rotation."""
    out, scale = call.fake()
    (m, k), rows = x.shape, out.shape[1]
    signs = call.operands.contiguous() if stages else x
    sizes = (x.stride(0) if m > 1 else k, m, k, k_padded, width, rows, factor)
    if call.out_dtype is torch.int8:
        columns, warps = _whole_token(1 << stages, width, m)
        rotations.to_int8[(8 * rows,)](
            x,
            signs,
            out,
            scale,
            *sizes,
            COLUMNS=columns,
            STAGES=stages,
            ONCE=columns >= width,
            num_warps=warps,
        )
    else:
        columns = max(1 << stages, min(_HALF_COLUMNS, 1 << (width - 1).bit_length()))
        rotations.to_halves[(8 * rows, -(-width // columns))](
            x,
            signs,
            out,
            *sizes,
            COLUMNS=columns,
            STAGES=stages,
            num_warps=min(32, max(1, columns // (256 if m <= _FEW else 512))),
        )
    return out, scale


def _turned(x: Tensor, matrices: Tensor, geometry: Geometry, passes: int) -> Tensor:
    """float32 ``[M, passes * k_padded]``: tokens times the matrices of a rotation ``qr``."""
    m, k = x.shape
    side, width = matrices.shape[-1], passes * geometry.k_padded
    rows = x.new_zeros((m, width), dtype=torch.float32)
    bm, bn = (16 if m <= 16 else 64), 64
    rotations.dense[(-(-m // bm) * -(-side // bn), geometry.groups, passes)](
        x,
        matrices,
        rows,
        x.stride(0) if m > 1 else k,
        m,
        k,
        geometry.full,
        side,
        geometry.padded_group,
        geometry.k_padded,
        width,
        BM=bm,
        BN=bn,
        BK=32,
    )
    return rows


# ── product ──────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=256)
def _table(book: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The codebook in memory, of pairs or for GPUs without PTX. Kept, so that a CUDA graph may read it."""
    return products.unpack_book(book, dtype, device)


@lru_cache(maxsize=256)
def _planes(book: tuple[int, ...], one_table: bool) -> tuple[int, ...]:
    """A codebook of 16-bit values as PRMT wants it: the lower bytes in four words, then the upper ones.

    With ``one_table`` the four words hold the int8 values of rows with one norm.
    """
    values = products.unpack_book(book, torch.float16, torch.device("cpu"))
    if one_table:
        exact = values.double()
        lower = upper = (exact * (127 / exact.abs().max())).round().to(torch.int8)
    else:
        lower, upper = values.view(torch.int8).view(16, 2).unbind(1)
    return tuple(torch.cat((lower, upper)).view(torch.int32).tolist())


@serves(CodebookGemmOp, "triton")
def codebook_gemm(call: CodebookGemmOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    return _multiply(call)


def _multiply(call: CodebookGemmOp) -> Tensor:
    y = call.fake()
    m, n = y.shape
    if m == 0:
        return y
    device, is_int8 = y.device, call.tokens is torch.int8
    x, units, norms, col_scale = (t.contiguous() for t in (call.x, call.units, call.norms, call.col_scale))
    vectors = (call.row_scale, call.fold, call.bias, call.residual)
    row_scale, fold, bias, residual = (None if t is None else t.contiguous() for t in vectors)
    ptx = runtime.has_ptx(device)
    book = tuple(call.book)
    one_table = call.row_norm and ptx
    in_pairs = products.is_pair_book(book)
    if ptx and not in_pairs:
        planes, table = _planes(book, one_table), norms if is_int8 else x
    else:
        planes, table = (0,) * 8, _table(book, torch.float16 if is_int8 else x.dtype, device)
    words = units.view(torch.int32), norms.view(torch.int32)
    slots = norms.shape[2]
    options = {
        "BITS": call.bits,
        "SLOTS": slots,
        "OFFSETS": not is_int8 and call.offsets,
        "ONE_TABLE": one_table,
        "ACTIVATION": call.activation,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "PAIRS": in_pairs,
        "PTX": ptx,
        "EXACT": runtime.interpreted(),
        "enable_fp_fusion": False,
    }

    def launch(tile: Tile) -> None:
        out = y if tile.parts == 1 else y.new_empty((tile.parts, m, n), dtype=torch.int32 if is_int8 else torch.float32)
        kernels.product[(-(-m // tile.rows) * -(-n // tile.columns), tile.parts)](
            x,
            row_scale,
            words[0],
            words[1],
            fold,
            col_scale,
            bias,
            residual,
            out,
            table,
            planes,
            m,
            n,
            units.shape[1],
            x.shape[1],
            BM=tile.rows,
            BN=tile.columns,
            GROUP=tile.group,
            TRANSPOSED=tile.transposed,
            SPARSE=2 * m <= tile.rows,
            PARTS=tile.parts,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **options,
        )
        if tile.parts > 1:
            runtime.finish(out, y, row_scale, col_scale, None, bias, residual, 0, call.activation)

    kind = (in_pairs, call.bits, slots, norms.shape[4], one_table, residual is not None)
    key = ("codebook", x.dtype, y.dtype, runtime.bucket(m), n, units.shape[1], kind)
    with runtime.on(device):
        runtime.launch_best(key, tiles_of(m), launch, device)
    return y


@serves(CodebookGemvOp, "triton")
def codebook_gemv(call: CodebookGemvOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    return _multiply(call.product(*_rotate(call.rotation)))
