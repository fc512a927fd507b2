"""The operators that compute a whole linear layer with int8 weights, one for each scheme and each kind of tokens.

The overload ``early_read`` (`qcut.ops.registry`) promises that weight, scales, sums and bias are ready. On CUDA, the
kernel of few tokens then reads them while its predecessor on the stream still runs. `qcut.Linear` calls this overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ShapeError
from qcut.numerics import int8 as numerics
from qcut.numerics import int16
from qcut.ops.checks import (
    BYTES,
    E4M3,
    F32,
    FLOAT_DTYPES,
    S8,
    S32,
    check_absmax,
    check_dtype,
    check_k,
    check_matrix,
    check_scale,
    check_tensor,
    check_tokens,
    check_zero_point,
    flat,
)
from qcut.ops.registry import MUTATED, operator
from qcut.schemes import FP8, K_ALIGNMENT, K_MAX, K_MAX_ZERO_POINT, check_activation, padded_k

FEW_ROWS = 8
"""Most rows of a product that, on CUDA, quantizes tokens by given magnitudes and computes those of its result."""
FEW_ELEMENTS = 16_384
"""Most elements of all tokens for which this pays, since every CTA of the product quantizes all tokens."""


def _check_layer(
    op: str,
    x: Tensor,
    qweight: Tensor,
    scale: tuple[str, Tensor],
    bias: Tensor | None,
    activation: str,
    weights: tuple[torch.dtype, ...] = S8,
    *,
    blocks: bool = True,
) -> None:
    """Checks of all layers; ``blocks`` allows e4m3 weights that have scales of blocks."""
    check_tokens(op, x)
    check_matrix(op, "qweight", qweight, 1, weights)
    n, k = qweight.shape[0], x.shape[-1]
    if qweight.shape[1] != padded_k(k):
        sizes = f"x has K = {k}, qweight has shape {list(qweight.shape)}"
        raise ShapeError(f"qcut::{op}: {sizes}; allowed: [N, {padded_k(k)}], K rounded up to {K_ALIGNMENT}")
    check_tensor(op, "qweight", qweight, weights, (n, padded_k(k)), x.device)
    blocks = blocks and qweight.dtype is torch.float8_e4m3fn and scale[1].dim() == 2
    check_tensor(op, scale[0], scale[1], F32, FP8(blocks).scale_shape(n, k), x.device)
    if bias is not None:
        check_tensor(op, "bias", bias, F32, (n,), x.device)
    check_activation(activation)


def _like_tokens(x: Tensor, qweight: Tensor) -> Tensor:
    """Memory for a layer's result, ``[..., N]``."""
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


def _by_rows(reference: Callable[..., Tensor], x: Tensor, qweight: Tensor, *rest: Any) -> Tensor:
    """Apply a reference for tokens ``[M, K]`` to tokens ``[..., K]``."""
    return reference(flat(x), qweight, *rest).view(*x.shape[:-1], qweight.shape[0])


@operator("w8a8_linear", returns="Tensor", layers=True)
class W8A8LinearOp(NamedTuple):
    """``y = act(f32(acc) * s_x[m] * s_w[n] + b[n])`` on tokens quantized with a scale each.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K from 1 to `qcut.schemes.K_MAX`, any strides.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: that of `qcut.gemm_s8`; a token's result does not depend on the other tokens.
    """

    x: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    early_read: bool = False

    def check(self) -> None:
        weight_scale = ("weight_scale", self.weight_scale)
        _check_layer("w8a8_linear", self.x, self.qweight, weight_scale, self.bias, self.activation)
        check_k("w8a8_linear", self.x.shape[-1], K_MAX)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        return _by_rows(numerics.w8a8_linear_ref, *self[:-1])


@operator("w8a8_static_linear", returns="Tensor", layers=True)
class W8A8StaticLinearOp(NamedTuple):
    """``y = act(f32(acc - z_x * colsum[n]) * col_scale[n] + b[n])`` on tokens quantized with one scale and zero point.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K from 1 to `qcut.schemes.K_MAX_ZERO_POINT`, any strides.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        col_scale: float32 ``[N]``, the rounded product ``x_scale * weight_scale[n]``.
        colsum: int32 ``[N]``, ``sum_k qweight[n, k]``.
        bias: float32 ``[N]``; None: zeros.
        x_scale: scale of the tokens, a positive float32.
        x_zero_point: zero point of the tokens, in [-128, 127].
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: that of `qcut.gemm_s8`; a token's result does not depend on the other tokens.
    """

    x: Tensor
    qweight: Tensor
    col_scale: Tensor
    colsum: Tensor
    bias: Tensor | None
    x_scale: float
    x_zero_point: int
    activation: str
    early_read: bool = False

    def check(self) -> None:
        op = "w8a8_static_linear"
        _check_layer(op, self.x, self.qweight, ("col_scale", self.col_scale), self.bias, self.activation)
        check_tensor(op, "colsum", self.colsum, S32, (self.qweight.shape[0],), self.x.device)
        check_k(op, self.x.shape[-1], K_MAX_ZERO_POINT)
        check_scale(op, "x_scale", self.x_scale)
        check_zero_point(op, "x_zero_point", self.x_zero_point)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        return _by_rows(numerics.w8a8_static_linear_ref, *self[:-1])


@operator("w8a16_linear", returns="Tensor", layers=True)
class W8A16LinearOp(NamedTuple):
    """``y = act((sum_k x[m, k] * qweight[n, k]) * s_w[n] + b[n])``: weights of a byte, float tokens.

    Args:
        x: float16 or bfloat16 ``[..., K]``, K >= 1, any strides; the CPU takes float32 as well.
        qweight: int8, or finite float8_e4m3fn, ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``; or of float8_e4m3fn, for each 16 rows and 128 columns,
            ``[ceil(N / 16), ceil(K / 128)]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.

    Exactness: sums are float32, in an order of the kernel's or of the BLAS library's own: an error of at most
    ``K * 2**-23 * sum_k |x * q|`` before the scale.
    """

    x: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    early_read: bool = False

    def check(self) -> None:
        weight_scale = ("weight_scale", self.weight_scale)
        _check_layer("w8a16_linear", self.x, self.qweight, weight_scale, self.bias, self.activation, BYTES)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        return _by_rows(numerics.w8a16_linear_ref, *self[:-1])


@operator("fp8_dynamic_linear", returns="Tensor", layers=True)
class FP8DynamicLinearOp(NamedTuple):
    """``y = act(sum_k(q[m, k] * qweight[n, k]) * s_x[m] * s_w[n] + b[n])`` on e4m3 tokens q with a scale each.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K >= 1, any strides.
        qweight: finite float8_e4m3fn ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.

    Exactness: tokens bitwise `qcut.numerics.float8.quantize_tokens_ref`, on every device. Products are exact. Sums are
    float32, in an order of the kernel's or of the BLAS library's own: before the scales, an error of at most
    ``K * 2**-23 * sum_k |q * qweight|`` on the CPU and of kernels that multiply 16-bit floats. Tensor cores that
    multiply e4m3 add with 14 bits: see `qcut.emitters.gemm.cutlass.fp8.FP8Cutlass`. A token's result does not depend on
    the other tokens' values.
    """

    x: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    early_read: bool = False

    def check(self) -> None:
        op, weight_scale = "fp8_dynamic_linear", ("weight_scale", self.weight_scale)
        _check_layer(op, self.x, self.qweight, weight_scale, self.bias, self.activation, E4M3, blocks=False)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        from qcut.numerics import float8  # here, as below: other schemes need none of it

        return _by_rows(float8.dynamic_linear_ref, *self[:-1])


@operator("fp8_static_linear", returns="Tensor", layers=True)
class FP8StaticLinearOp(NamedTuple):
    """``y = act(sum_k(q[m, k] * qweight[n, k]) * col_scale[n] + b[n])`` on e4m3 tokens q with one scale.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K >= 1, any strides.
        qweight: finite float8_e4m3fn ``[N, padded_k(K)]``, N >= 1, zero padded.
        col_scale: float32 ``[N]``, the rounded product ``x_scale * weight_scale[n]``.
        bias: float32 ``[N]``; None: zeros.
        x_scale: scale of the tokens, a float32 from 2**-126 on.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.

    Exactness: tokens bitwise `qcut.numerics.float8.quantize_tensor_ref`, on every device; sums as of
    ``fp8_dynamic_linear``.
    """

    x: Tensor
    qweight: Tensor
    col_scale: Tensor
    bias: Tensor | None
    x_scale: float
    activation: str
    early_read: bool = False

    def check(self) -> None:
        op, col_scale = "fp8_static_linear", ("col_scale", self.col_scale)
        _check_layer(op, self.x, self.qweight, col_scale, self.bias, self.activation, E4M3, blocks=False)
        check_scale(op, "x_scale", self.x_scale)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        from qcut.numerics import float8

        return _by_rows(float8.static_linear_ref, *self[:-1])


@operator("int16x8_linear", returns="Tensor", layers=True)
class Int16x8LinearOp(NamedTuple):
    """``y = act(f32(acc) * s_x[m] * s_w[n] + b[n])`` on int16 tokens with a scale each, ``acc`` in int64.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K from 1 to `qcut.schemes.K_MAX`, any strides.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: that of `qcut.gemm_s8`; a token's result does not depend on the other tokens.
    """

    x: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    early_read: bool = False

    def check(self) -> None:
        op = "int16x8_linear"
        _check_layer(op, self.x, self.qweight, ("weight_scale", self.weight_scale), self.bias, self.activation)
        check_k(op, self.x.shape[-1], K_MAX)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        return _by_rows(int16.int16x8_linear_ref, *self[:-1])


@operator("int16x8_static_linear", returns="Tensor", layers=True)
class Int16x8StaticLinearOp(NamedTuple):
    """``y = act(f32(acc) * col_scale[n] + b[n])`` on int16 tokens with one calibrated scale, ``acc`` in int64.

    Args:
        x: float16, bfloat16 or float32 ``[..., K]``, K from 1 to `qcut.schemes.K_MAX`, any strides.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        col_scale: float32 ``[N]``, the rounded product ``x_scale * weight_scale[n]``.
        bias: float32 ``[N]``; None: zeros.
        x_scale: scale of the tokens, a positive float32.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[..., N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: that of `qcut.gemm_s8`; a token's result does not depend on the other tokens.
    """

    x: Tensor
    qweight: Tensor
    col_scale: Tensor
    bias: Tensor | None
    x_scale: float
    activation: str
    early_read: bool = False

    def check(self) -> None:
        op = "int16x8_static_linear"
        _check_layer(op, self.x, self.qweight, ("col_scale", self.col_scale), self.bias, self.activation)
        check_k(op, self.x.shape[-1], K_MAX)
        check_scale(op, "x_scale", self.x_scale)

    def fake(self) -> Tensor:
        return _like_tokens(self.x, self.qweight)

    def cpu(self) -> Tensor:
        return _by_rows(int16.int16x8_static_linear_ref, *self[:-1])


@operator("int8_linear", returns="Tensor", layers=True, pure=True)
class Int8LinearOp(NamedTuple):
    """``y = act(f32(acc) * q_scale[m] * s_w[n] + b[n])`` on tokens that are int8 already, as a norm leaves them.

    Args:
        q: int8 ``[M, K]``, K a multiple of 16 up to `qcut.schemes.K_MAX`.
        q_scale: float32 ``[M]``.
        qweight: int8 ``[N, K]``.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.
        dtype: float16, bfloat16 or float32.
        absmax: float32 ``[M]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.

    Returns:
        y, ``dtype`` ``[M, N]``, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.

    Exactness: bitwise ``w8a8_linear`` of the tokens that ``quantize_per_token`` made q of.
    """

    q: Tensor
    q_scale: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    dtype: torch.dtype
    absmax: Annotated[Tensor | None, MUTATED] = None
    early_read: bool = False

    def check(self) -> None:
        op, q = "int8_linear", self.q
        for name, matrix in (("q", q), ("qweight", self.qweight)):
            check_dtype(op, name, matrix.dtype, S8)
            if matrix.dim() != 2 or not 1 <= matrix.shape[1] <= K_MAX or matrix.shape[1] % K_ALIGNMENT:
                allowed = f"[rows, K], K a multiple of {K_ALIGNMENT} up to {K_MAX}"
                raise ShapeError(f"qcut::{op}: {name} has shape {list(matrix.shape)}; allowed: {allowed}")
        n, k = self.qweight.shape
        check_tensor(op, "q", q, S8, (q.shape[0], k), self.qweight.device)
        check_tensor(op, "q_scale", self.q_scale, F32, (q.shape[0],), q.device)
        check_tensor(op, "weight_scale", self.weight_scale, F32, (n,), q.device)
        if self.bias is not None:
            check_tensor(op, "bias", self.bias, F32, (n,), q.device)
        check_activation(self.activation)
        check_dtype(op, "dtype", self.dtype, FLOAT_DTYPES)
        check_absmax(op, "absmax", self.absmax, q)

    def fake(self) -> Tensor:
        return self.q.new_empty((self.q.shape[0], self.qweight.shape[0]), dtype=self.dtype)

    def cpu(self) -> Tensor:
        y = numerics.gemm_s8_ref(
            self.q,
            self.qweight,
            row_scale=self.q_scale,
            col_scale=self.weight_scale,
            bias=self.bias,
            activation=self.activation,
            out_dtype=self.dtype,
        )
        numerics.raise_absmax(self.absmax, y)
        return y


@operator("noted_linear", returns="Tensor", layers=True)
class LinearWithAbsmaxOp(NamedTuple):
    """The formula of ``w8a8_linear`` on rows with known largest magnitudes.

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K from 1 to `qcut.schemes.K_MAX`, any strides.
        x_absmax: float32 ``[M]``, contiguous, ``max |x[m]|``.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[M, N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: bitwise ``w8a8_linear`` of x.
    """

    x: Tensor
    x_absmax: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    early_read: bool = False

    def check(self) -> None:
        op, x = "noted_linear", self.x
        if x.dim() != 2:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K]")
        _check_layer(op, x, self.qweight, ("weight_scale", self.weight_scale), self.bias, self.activation)
        check_k(op, x.shape[-1], K_MAX)
        check_absmax(op, "x_absmax", self.x_absmax, x)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape[0], self.qweight.shape[0])

    def cpu(self) -> Tensor:
        return numerics.w8a8_linear_ref(self.x, self.qweight, self.weight_scale, self.bias, self.activation)
