"""Int8 products that take part in a norm: the one behind it computes it, the one before it notes magnitudes for it.

With ``constants`` the caller promises that no kernel queued just before writes the weight, scales, bias or the norm's
weight, which the kernel then reads while its predecessor on the stream still runs.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from qcut.config import K_MAX, check_activation, padded_k
from qcut.errors import ShapeError
from qcut.numerics import folded_norms as numerics
from qcut.numerics.int8 import raise_absmax
from qcut.ops.checks import F32, FLOAT_DTYPES, S8, check_absmax, check_dtype, check_k, check_tensor
from qcut.ops.registry import MUTATED, operator


@operator("normed_linear", returns="Tensor")
class NormedLinear(NamedTuple):
    """A norm of rows, and an int8 product of the normalized rows in one kernel.

    The norm's weight is multiplied before rows are quantized, its root and its mean behind the product::

        s[m] = x_absmax[m] / 127, or 1 where that is 0
        q    = clamp(rne(f32(x) * f32(gain) / s), -127, 127)
        mean = sum_k x / K of a LayerNorm, else 0;  r = rsqrt(max(sum_k x**2 / K - mean**2, 0) + eps)
        y    = act(f32(q W^T) * (s[m] * r[m]) * s_w[n] + (b[n] - mean[m] * r[m] * gain_sums[n]))

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K from 1 to `qcut.config.K_MAX`, any strides.
        x_absmax: float32 ``[M]``, contiguous, ``max_k |f32(x[m, k]) * f32(gain[k])|``, as ``residual_linear`` notes it.
        gain: ``[K]`` of x's type, the norm's weight.
        gain_sums: float32 ``[N]``, `qcut.numerics.folded_norms.column_sums` of gain, for a LayerNorm; None: an RMSNorm.
        eps: added under the root.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``, which holds the norm's bias times the weight, too; None: zeros.
        activation: one of `qcut.config.ACTIVATIONS`.
        absmax: float32 ``[M]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.
        constants: see the module.

    Returns:
        y, ``[M, N]`` of x's type, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: q and the product are exact. Sums over K for mean and root are float32 in an order that differs between
    devices, with an error of at most ``K * 2**-24`` of the sum of their terms' magnitudes; a mean that is large beside
    the deviation loses as many digits of it. The result differs from that of a norm before the product by roundings:
    the norm's result is not rounded to x's type, and rows are quantized before they are divided by the root.
    """

    x: Tensor
    x_absmax: Tensor
    gain: Tensor
    gain_sums: Tensor | None
    eps: float
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    absmax: Annotated[Tensor | None, MUTATED] = None
    constants: bool = False

    def check(self) -> None:
        op, x = "normed_linear", self.x
        n = _check_product(op, x, self.x_absmax, self.qweight, self.weight_scale, self.bias)
        check_tensor(op, "gain", self.gain, (x.dtype,), x.shape[1:], x.device)
        if self.gain_sums is not None:
            check_tensor(op, "gain_sums", self.gain_sums, F32, (n,), x.device)
        check_activation(self.activation)
        check_absmax(op, "absmax", self.absmax, x)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape[0], self.qweight.shape[0])

    def cpu(self) -> Tensor:
        y = numerics.normed_linear_ref(*self[:9])
        raise_absmax(self.absmax, y)
        return y


@operator("residual_linear", returns="Tensor")
class ResidualLinear(NamedTuple):
    """``y = rne(f32(acc) * s_x[m] * s_w[n] + b[n] + residual[m, n])``, and what a folded norm of y has to know.

    Args:
        x: float16, bfloat16 or float32 ``[M, K]``, K from 1 to `qcut.config.K_MAX`, any strides.
        x_absmax: float32 ``[M]``, contiguous, ``max |x[m]|``.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]``; None: zeros.
        residual: ``[M, N]`` of x's type, contiguous.
        gain: ``[N]`` of x's type, the weight of the norm behind y; only with ``absmax``, and None without.
        absmax: float32 ``[M]``, contiguous, raised to ``max_n |f32(y[m, n]) * f32(gain[n])|``; None: not wanted.
        constants: see the module.

    Returns:
        y, ``[M, N]`` of x's type, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument that is not as above.
        QuantizationError: K beyond the exact range.

    Exactness: bitwise.
    """

    x: Tensor
    x_absmax: Tensor
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    residual: Tensor
    gain: Tensor | None = None
    absmax: Annotated[Tensor | None, MUTATED] = None
    constants: bool = False

    def check(self) -> None:
        op, x = "residual_linear", self.x
        n = _check_product(op, x, self.x_absmax, self.qweight, self.weight_scale, self.bias)
        check_tensor(op, "residual", self.residual, (x.dtype,), (x.shape[0], n), x.device)
        if not self.residual.is_contiguous():
            raise ShapeError(f"qcut::{op}: residual has strides {self.residual.stride()}; allowed: contiguous")
        if (self.gain is None) != (self.absmax is None):
            raise ShapeError(f"qcut::{op}: gain without absmax, or absmax without gain; allowed: both or neither")
        if self.gain is not None:
            check_tensor(op, "gain", self.gain, (x.dtype,), (n,), x.device)
        check_absmax(op, "absmax", self.absmax, x)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape[0], self.qweight.shape[0])

    def cpu(self) -> Tensor:
        y = numerics.residual_linear_ref(*self[:6])
        if self.gain is not None:
            raise_absmax(self.absmax, y.float() * self.gain.float())
        return y


def _check_product(
    op: str, x: Tensor, x_absmax: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> int:
    """Check what both operators take, and return the columns of the result."""
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
    if qweight.dim() != 2 or len(qweight) < 1:
        raise ShapeError(f"qcut::{op}: qweight has shape {list(qweight.shape)}; allowed: [N, K] with N >= 1")
    n, k = qweight.shape[0], x.shape[1]
    check_k(op, k, K_MAX)
    check_tensor(op, "qweight", qweight, S8, (n, padded_k(k)), x.device)
    check_tensor(op, "weight_scale", weight_scale, F32, (n,), x.device)
    if bias is not None:
        check_tensor(op, "bias", bias, F32, (n,), x.device)
    check_absmax(op, "x_absmax", x_absmax, x)
    return n
