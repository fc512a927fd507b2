"""`qcut.ops.linear` in Triton: linear layers with int16 tokens and int8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.triton import launch as runtime
from qcut.backends.triton.int8 import MOST_AT_ONCE, product, rows_of
from qcut.backends.triton.kernels import int8 as kernels
from qcut.numerics import int16
from qcut.ops.linear import Int16x8LinearOp, Int16x8StaticLinearOp
from qcut.ops.registry import serves


def quantized_rows(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """`qcut.numerics.int16.quantize_tokens_ref` of rows with unit column stride, as halves; M at least 1.

    Returns:
        int8 ``[16 * ceil(M / 8), k_padded]``, the halves as `qcut.numerics.int16.in_blocks` lays them down, where rows
        of no token hold anything; scales float32 ``[M]``.
    """
    m, k = x.shape
    q = x.new_empty((int16.rows_of_blocks(m), k_padded), dtype=torch.int8)
    scale = x.new_empty(m, dtype=torch.float32)
    block = min(max(128, 1 << (k_padded - 1).bit_length()), MOST_AT_ONCE)
    with runtime.on(x.device):
        kernels.quantize_rows_to_halves[(m,)](
            x,
            q,
            scale,
            x.stride(0),
            k,
            k_padded,
            BLOCK=block,
            ONCE=block >= k_padded,
            num_warps=max(1, block // 1024),
            enable_fp_fusion=False,
        )
    return q, scale


def quantized_by(x: Tensor, scale: float, k_padded: int) -> Tensor:
    """`qcut.numerics.int16.quantize_tensor_ref` of rows with unit column stride, as halves; M at least 1."""
    m, k = x.shape
    q = x.new_empty((int16.rows_of_blocks(m), k_padded), dtype=torch.int8)
    block = min(max(128, 1 << (k_padded - 1).bit_length()), 2048)
    inverse = float(
        torch.ones((), dtype=torch.float32, device="cpu") / torch.full((), scale, dtype=torch.float32, device="cpu")
    )
    with runtime.on(x.device):
        kernels.quantize_to_halves_by[(m, -(-k_padded // block))](
            x, q, x.stride(0), k, k_padded, inverse, BLOCK=block, enable_fp_fusion=False
        )
    return q


@serves(Int16x8LinearOp, "triton")
def int16x8_linear(call: Int16x8LinearOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    if not call.x.numel():
        return call.fake()
    q, scale = quantized_rows(rows_of(call.x), call.qweight.shape[1])
    weight = call.qweight, call.weight_scale, call.bias
    y = product(q, *weight, call.activation, call.x.dtype, row_scale=scale, tokens=len(scale))
    return y.view(*call.x.shape[:-1], -1)


@serves(Int16x8StaticLinearOp, "triton")
def int16x8_static_linear(call: Int16x8StaticLinearOp) -> Tensor:
    call.check()
    runtime.require_device(call.x.device)
    if not call.x.numel():
        return call.fake()
    x, weight = rows_of(call.x), (call.qweight, call.col_scale, call.bias)
    q = quantized_by(x, call.x_scale, call.qweight.shape[1])
    y = product(q, *weight, call.activation, call.x.dtype, tokens=len(x))
    return y.view(*call.x.shape[:-1], -1)
