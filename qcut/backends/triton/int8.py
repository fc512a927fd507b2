"""`qcut.ops.linear` in Triton: linear layers with int8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.backends.triton import launch as runtime
from qcut.backends.triton.kernels import int8 as kernels
from qcut.errors import DtypeError
from qcut.numerics import int8 as numerics
from qcut.ops.linear import Int8LinearOp, LinearWithAbsmaxOp, W8A8LinearOp, W8A8StaticLinearOp, W8A16LinearOp
from qcut.ops.registry import serves

MOST_AT_ONCE = 16_384
"""Most columns that one program holds in registers."""


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        rows: tokens of a program, or halves of tokens.
        columns: output channels of a program.
        depth: columns of the weight in one step.
        transposed: whether weights have the rows of the tensor core's tile.
        warps: of a program.
        stages: steps with loads under way.
        parts: programs that share the columns of the weight, for weights of few rows.
        group: tiles of rows that take turns on the columns.
        boxes: whether tiles are loaded by tensor descriptors.
    """

    rows: int
    columns: int
    depth: int
    transposed: bool
    warps: int
    stages: int
    parts: int = 1
    group: int = 8
    boxes: bool = False


def tiles_of(m: int, is_int8: bool) -> Sequence[Tile]:
    """The tiles to choose from for m rows, the likeliest first."""
    if m <= 16:
        rows = 16
        return [
            Tile(rows, 32, 256, True, 4, 4),
            Tile(rows, 16, 256, True, 2, 5),
            Tile(rows, 64, 128, True, 4, 5),
            Tile(rows, 64, 128, True, 4, 5, 2),
            Tile(rows, 64, 128, True, 4, 5, 4),
        ]
    if m <= 64:
        rows = 32 if m <= 32 else 64
        return [
            Tile(rows, 64, 128, True, 4, 4),
            Tile(rows, 64, 128, True, 4, 4, 2),
            Tile(rows, 64, 128, True, 4, 4, 4),
            Tile(rows, 64, 256, True, 4, 3),
            Tile(rows, 32, 256, True, 4, 4),
        ]
    if m <= 256:
        depth = 128 if is_int8 else 64
        return [
            Tile(64, 64, 2 * depth, not is_int8, 4, 3),
            Tile(128, 64, depth, not is_int8, 4, 4),
            Tile(128, 64, depth, not is_int8, 4, 4, 4),
            Tile(128, 128, depth, not is_int8, 8, 4),
            Tile(128, 64, depth, not is_int8, 4, 4, 2),
        ]
    if is_int8:
        return [
            Tile(128, 256, 128, False, 8, 4, boxes=True),
            Tile(256, 128, 128, False, 8, 3, boxes=True),
            Tile(128, 256, 128, False, 8, 3),
            Tile(128, 128, 128, False, 4, 4),
            Tile(64, 128, 128, False, 4, 4),
        ]
    return [
        Tile(256, 128, 64, True, 8, 3, boxes=True),
        Tile(256, 128, 64, True, 8, 3),
        Tile(128, 128, 64, True, 4, 4),
        Tile(128, 64, 64, True, 4, 4),
        Tile(64, 128, 64, True, 4, 4),
    ]


def quantized_rows(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """`qcut.numerics.int8.quantize_per_token_ref` of rows with unit column stride; M at least 1."""
    m, k = x.shape
    q = x.new_empty((m, k_padded), dtype=torch.int8)
    scale = x.new_empty(m, dtype=torch.float32)
    block = min(max(128, 1 << (k_padded - 1).bit_length()), MOST_AT_ONCE)
    with runtime.on(x.device):
        kernels.quantize_rows[(m,)](
            x, q, scale, x.stride(0), k, k_padded, BLOCK=block, ONCE=block >= k_padded, num_warps=max(1, block // 1024)
        )
    return q, scale


def quantized_by(x: Tensor, scale: float, zero_point: int, k_padded: int) -> Tensor:
    """`qcut.numerics.int8.quantize_per_tensor_ref` of rows with unit column stride; M at least 1."""
    m, k = x.shape
    q = x.new_empty((m, k_padded), dtype=torch.int8)
    block = min(max(128, 1 << (k_padded - 1).bit_length()), 2048)
    with runtime.on(x.device):
        kernels.quantize_by[(m, -(-k_padded // block))](x, q, x.stride(0), k, k_padded, scale, zero_point, BLOCK=block)
    return q


def product(
    x: Tensor,
    weight: Tensor,
    col_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out: torch.dtype,
    *,
    row_scale: Tensor | None = None,
    colsum: Tensor | None = None,
    zero_point: int = 0,
    tokens: int | None = None,
) -> Tensor:
    """``act((x w^T - zero_point * colsum) * row_scale * col_scale + bias)``, ``[M, N]`` of ``out``.

    Args:
        x: int8, float16 or bfloat16 ``[M, K]`` with unit column stride, M at least 1.
        weight: int8 ``[N, K or more]``, zero beyond K.
        col_scale: float32 ``[N]``.
        bias: float32 ``[N]`` or None.
        activation: see `qcut.schemes.ACTIVATIONS`.
        out: dtype of the result.
        row_scale: float32 ``[M]`` or None.
        colsum: int32 ``[N]``, with a zero point.
        zero_point: of x.
        tokens: M where x has the halves of int16 tokens, in the blocks of `qcut.numerics.int16.in_blocks`.
    """
    (rows, k), n, device = x.shape, len(weight), x.device
    m, used = (rows, rows) if tokens is None else (tokens, 2 * tokens)
    y = x.new_empty((m, n), dtype=out)
    weight, col_scale = weight.contiguous(), col_scale.contiguous()
    bias, row_scale, colsum = (None if t is None else t.contiguous() for t in (bias, row_scale, colsum))
    ptx = runtime.has_ptx(device)
    boxes = runtime.has_boxes(x) and runtime.has_boxes(weight)
    tiles = [tile for tile in tiles_of(rows, x.dtype is torch.int8) if boxes or not tile.boxes]
    sums = torch.int64 if tokens is not None else torch.int32 if x.dtype is torch.int8 else torch.float32

    def launch(tile: Tile) -> None:
        x_box = runtime.box(x, (tile.rows, tile.depth)) if tile.boxes else None
        w_box = runtime.box(weight, (tile.columns, tile.depth)) if tile.boxes else None
        to = y if tile.parts == 1 else y.new_empty((tile.parts, m, n), dtype=sums)
        grid = (-(-rows // tile.rows) * -(-n // tile.columns), tile.parts)
        kernels.product[grid](
            x,
            weight,
            x_box,
            w_box,
            to,
            row_scale,
            col_scale,
            colsum,
            bias,
            m,
            n,
            k,
            x.stride(0),
            weight.stride(0),
            zero_point,
            ACTIVATION=activation,
            HAS_ROW_SCALE=row_scale is not None,
            HAS_COLSUM=colsum is not None,
            HAS_BIAS=bias is not None,
            WHOLE_K=k % tile.depth == 0,
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            GROUP=tile.group,
            TRANSPOSED=tile.transposed,
            SPARSE=2 * used <= tile.rows,
            BOXES=tile.boxes,
            PARTS=tile.parts,
            PTX=ptx,
            HALVES=tokens is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        if tile.parts > 1:
            runtime.finish(to, y, row_scale, col_scale, colsum, bias, None, zero_point, activation)

    key = ("int8" if tokens is None else "int16", x.dtype, out, runtime.bucket(m), n, k, boxes)
    with runtime.on(device):
        runtime.launch_best(key, tiles, launch, device)
    return y


def rows_of(x: Tensor) -> Tensor:
    """``[M, K]`` with unit column stride; a view where x has one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@serves(W8A8LinearOp, "triton")
def w8a8_linear(call: W8A8LinearOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    if not call.x.numel():
        return call.fake()
    q, scale = quantized_rows(rows_of(call.x), call.qweight.shape[1])
    y = product(q, call.qweight, call.weight_scale, call.bias, call.activation, call.x.dtype, row_scale=scale)
    return y.view(*call.x.shape[:-1], -1)


@serves(W8A8StaticLinearOp, "triton")
def w8a8_static_linear(call: W8A8StaticLinearOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    if not call.x.numel():
        return call.fake()
    q = quantized_by(rows_of(call.x), call.x_scale, call.x_zero_point, call.qweight.shape[1])
    weight, zero_point = (call.qweight, call.col_scale, call.bias), call.x_zero_point
    y = product(q, *weight, call.activation, call.x.dtype, colsum=call.colsum, zero_point=zero_point)
    return y.view(*call.x.shape[:-1], -1)


@serves(W8A16LinearOp, "triton")
def w8a16_linear(call: W8A16LinearOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    if call.x.dtype is torch.float32:
        raise DtypeError(f"qcut::w8a16_linear: x is {call.x.dtype}; allowed on the Triton back end: float16, bfloat16")
    if call.qweight.dtype is not torch.int8:
        raise DtypeError(f"qcut::w8a16_linear: qweight is {call.qweight.dtype}; allowed on the Triton back end: int8")
    if not call.x.numel():
        return call.fake()
    y = product(rows_of(call.x), call.qweight, call.weight_scale, call.bias, call.activation, call.x.dtype)
    return y.view(*call.x.shape[:-1], -1)


@serves(Int8LinearOp, "triton")
def int8_linear(call: Int8LinearOp) -> Tensor:
    call.check()
    runtime.require_device(call.q.device)
    if not len(call.q):
        return call.fake()
    row_scale = call.q_scale
    y = product(
        rows_of(call.q), call.qweight, call.weight_scale, call.bias, call.activation, call.dtype, row_scale=row_scale
    )
    numerics.raise_absmax(call.absmax, y)
    return y


@serves(LinearWithAbsmaxOp, "triton")
def linear_with_absmax(call: LinearWithAbsmaxOp) -> Tensor:
    call.check()
    return w8a8_linear(W8A8LinearOp(call.x, call.qweight, call.weight_scale, call.bias, call.activation))
