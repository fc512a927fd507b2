"""The operators that quantize tokens to int8, scale int8 values back, and sum rows of int8."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.errors import ShapeError
from qcut.numerics import int8 as numerics
from qcut.ops.checks import (
    F32,
    FLOAT_DTYPES,
    check_dtype,
    check_k,
    check_matrix,
    check_scale,
    check_tensor,
    check_tokens,
    check_zero_point,
    flat,
)
from qcut.ops.registry import operator
from qcut.schemes import K_MAX


def _check_padding(op: str, x: Tensor, k_padded: int) -> None:
    if k_padded < x.shape[-1]:
        raise ShapeError(f"qcut::{op}: k_padded is {k_padded}; allowed: at least K = {x.shape[-1]}")


@operator("quantize_per_token", returns="(Tensor, Tensor)")
class QuantizePerTokenOp(NamedTuple):
    """Rounds every token to int8 with a scale of its own, ``max |x[m]| / 127``.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K >= 1, any strides.
        k_padded: columns of q, at least K; those from K on are zeros.

    Returns:
        q, int8 ``[M, k_padded]``, and its scales, float32 ``[M]``; M counts the tokens of all leading dimensions.

    Raises:
        DtypeError, ShapeError: an argument that is not as above.

    Exactness: bitwise `qcut.numerics.int8.quantize_per_token_ref`, on every device.
    """

    x: Tensor
    k_padded: int

    def check(self) -> None:
        check_tokens("quantize_per_token", self.x)
        _check_padding("quantize_per_token", self.x, self.k_padded)

    def fake(self) -> tuple[Tensor, Tensor]:
        m = math.prod(self.x.shape[:-1])
        q = self.x.new_empty((m, self.k_padded), dtype=torch.int8)
        return q, self.x.new_empty((m,), dtype=torch.float32)

    def cpu(self) -> tuple[Tensor, Tensor]:
        return numerics.quantize_per_token_ref(flat(self.x), self.k_padded)


@operator("quantize_per_tensor", returns="Tensor")
class QuantizePerTensorOp(NamedTuple):
    """Rounds all tokens to int8 with one scale and zero point, ``clamp(rne(x / scale) + zero_point)``.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K >= 1, any strides.
        scale: a positive float32.
        zero_point: in [-128, 127].
        k_padded: columns of q, at least K; those from K on are zeros.

    Returns:
        q, int8 ``[M, k_padded]``; M counts the tokens of all leading dimensions.

    Raises:
        DtypeError, ShapeError, ConfigError: an argument that is not as above.

    Exactness: bitwise `qcut.numerics.int8.quantize_per_tensor_ref`, on every device.
    """

    x: Tensor
    scale: float
    zero_point: int
    k_padded: int

    def check(self) -> None:
        op = "quantize_per_tensor"
        check_tokens(op, self.x)
        _check_padding(op, self.x, self.k_padded)
        check_scale(op, "scale", self.scale)
        check_zero_point(op, "zero_point", self.zero_point)

    def fake(self) -> Tensor:
        return self.x.new_empty((math.prod(self.x.shape[:-1]), self.k_padded), dtype=torch.int8)

    def cpu(self) -> Tensor:
        return numerics.quantize_per_tensor_ref(flat(self.x), self.scale, self.zero_point, self.k_padded)


@operator("dequantize", returns="Tensor")
class DequantizeOp(NamedTuple):
    """Scales int8 rows back: ``dtype(f32(q[m, k]) * scale[m])``.

    Args:
        q: int8 ``[M, K]``, K >= 1, any strides.
        scale: float32 ``[M]``.
        dtype: float16, bfloat16 or float32.

    Returns:
        ``dtype`` ``[M, K]``, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument that is not as above.

    Exactness: bitwise `qcut.numerics.int8.dequantize_ref`, on every device.
    """

    q: Tensor
    scale: Tensor
    dtype: torch.dtype

    def check(self) -> None:
        check_matrix("dequantize", "q", self.q)
        check_tensor("dequantize", "scale", self.scale, F32, (self.q.shape[0],), self.q.device)
        check_dtype("dequantize", "dtype", self.dtype, FLOAT_DTYPES)

    def fake(self) -> Tensor:
        return self.q.new_empty(self.q.shape, dtype=self.dtype)

    def cpu(self) -> Tensor:
        return numerics.dequantize_ref(self.q.contiguous(), self.scale, self.dtype)


@operator("colsum", returns="Tensor")
class ColSumOp(NamedTuple):
    """``sum_k q[n, k]``: column sums of the right operand of a product; q is its transpose.

    Args:
        q: int8 ``[N, K]``, 1 <= K <= `qcut.schemes.K_MAX`, any strides.

    Returns:
        int32 ``[N]``.

    Raises:
        DtypeError, ShapeError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: exact.
    """

    q: Tensor

    def check(self) -> None:
        check_matrix("colsum", "q", self.q)
        check_k("colsum", self.q.shape[1], K_MAX)

    def fake(self) -> Tensor:
        return self.q.new_empty((self.q.shape[0],), dtype=torch.int32)

    def cpu(self) -> Tensor:
        return numerics.colsum_ref(self.q)
