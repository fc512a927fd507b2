"""The operators of ``torch.ops.qcut`` for W8A8 layers of rows about which their maker says more than what they are.

Either int8 with scales, as a norm gives them, or of a floating type with their largest magnitudes. CUDA runs
`qcut.cuda.w8a8`, which reads few tokens with those at the speed of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.config import K_MAX, check_activation
from qcut.errors import ShapeError
from qcut.numerics import int8 as numerics
from qcut.ops.registry import FLOAT_DTYPES, check_absmax, check_dtype, check_tensor, define

FEW_ROWS = 8
"""Rows up to which CUDA's kernels note largest magnitudes, and quantize by them. Of more, a kernel before does."""
FEW_ELEMENTS = 16_384
"""Of all rows, up to which that is faster: every CTA of a product quantizes all of them."""

_S8, _F32 = (torch.int8,), (torch.float32,)


def _check_int8(
    q: Tensor,
    q_scale: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    absmax: Tensor | None = None,
) -> None:
    op = "int8_linear"
    for name, matrix in (("q", q), ("qweight", qweight)):
        check_dtype(op, name, matrix.dtype, _S8)
        if matrix.dim() != 2 or not 1 <= matrix.shape[1] <= K_MAX or matrix.shape[1] % 16:
            allowed = f"[rows, K], K a multiple of 16 up to {K_MAX}"
            raise ShapeError(f"qcut::{op}: {name} has shape {list(matrix.shape)}; allowed: {allowed}")
    n, k = qweight.shape
    check_tensor(op, "q", q, _S8, (len(q), k), qweight.device)
    check_tensor(op, "q_scale", q_scale, _F32, (len(q),), q.device)
    check_tensor(op, "weight_scale", weight_scale, _F32, (n,), q.device)
    if bias is not None:
        check_tensor(op, "bias", bias, _F32, (n,), q.device)
    check_activation(activation)
    check_dtype(op, "dtype", dtype, FLOAT_DTYPES)
    check_absmax(op, "absmax", absmax, q)


def _int8_fake(
    q: Tensor,
    q_scale: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    absmax: Tensor | None = None,
) -> Tensor:
    return q.new_empty((len(q), len(qweight)), dtype=dtype)


def _int8_cpu(
    q: Tensor,
    q_scale: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    absmax: Tensor | None = None,
) -> Tensor:
    y = numerics.gemm_s8_ref(
        q, qweight, row_scale=q_scale, col_scale=weight_scale, bias=bias, activation=activation, out_dtype=dtype
    )
    numerics.raise_absmax(absmax, y)
    return y


define(
    "int8_linear(Tensor q, Tensor q_scale, Tensor qweight, Tensor weight_scale, Tensor? bias, str activation, "
    "ScalarType dtype, Tensor(a!)? absmax=None) -> Tensor",
    _check_int8,
    _int8_fake,
    _int8_cpu,
    cuda="cuda.w8a8",
)


def _check_noted(
    x: Tensor, x_absmax: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> None:
    from qcut.ops.int8 import _check_w8a8_linear

    op = "noted_linear"
    if x.dim() != 2:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K]")
    _check_w8a8_linear(x, qweight, weight_scale, bias, activation, op)
    check_absmax(op, "x_absmax", x_absmax, x)


def _noted_fake(
    x: Tensor, x_absmax: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    return x.new_empty(len(x), len(qweight))


def _noted_cpu(
    x: Tensor, x_absmax: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    return numerics.w8a8_linear_ref(x, qweight, weight_scale, bias, activation)


define(
    "noted_linear(Tensor x, Tensor x_absmax, Tensor qweight, Tensor weight_scale, Tensor? bias, str activation) "
    "-> Tensor",
    _check_noted,
    _noted_fake,
    _noted_cpu,
    cuda="cuda.w8a8",
)
