"""Norms that are folded into the int8 products before and behind them.

A norm is a factor for each column, its weight, and a factor and a term for each row. The product behind a norm
multiplies rows by the weight before it quantizes them; the rest is linear, and changes its epilogue. The product before
a norm notes what the one behind it has to know first: the largest magnitude of each row times the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qcut.numerics.int8 import epilogue_ref, matmul_s8, quantize_by_absmax_ref

_ROWS = 1024
"""Rows of weights that are in float64 at a time."""


def column_sums(qweight: Tensor, weight_scale: Tensor, columns: Tensor) -> Tensor:
    """``sum_k columns[k] * qweight[n, k] * weight_scale[n]``, by which a LayerNorm's mean and bias pass a product.

    Args:
        qweight: int8 ``[N, K_padded]``.
        weight_scale: float32 ``[N]``.
        columns: ``[K]``, K at most ``K_padded``.

    Returns:
        float32 ``[N]``, rounded once from float64.
    """
    codes, factors = qweight[:, : len(columns)], columns.double()
    sums = [part.double() @ factors for part in codes.split(_ROWS)]
    return (torch.cat(sums) * weight_scale.double()).float()


def normed_linear_ref(
    x: Tensor,
    x_absmax: Tensor,
    gain: Tensor,
    gain_sums: Tensor | None,
    eps: float,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    matmul: Callable[[Tensor, Tensor], Tensor] = matmul_s8,
) -> Tensor:
    """A norm of rows and an int8 product of the normalized rows; `torch.ops.qcut.normed_linear` has the formula.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        x_absmax: float32 ``[M]``, ``max_k |f32(x[m, k]) * f32(gain[k])|``.
        gain: ``[K]``, the norm's weight.
        gain_sums: float32 ``[N]``, `column_sums` of gain, for a LayerNorm; None: an RMSNorm.
        eps: added under the root.
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]`` or None; of a LayerNorm with what `column_sums` makes of its own bias.
        activation: see `qcut.config.ACTIVATIONS`.
        matmul: computes int32 ``[M, N]`` of int8 ``[M, K]`` and ``[N, K]``.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: quantized rows and integer sums are bitwise; mean and root are float32 sums in an order of the device's.
    """
    f = x.float()
    q, scale = quantize_by_absmax_ref(f * gain.float(), x_absmax, qweight.shape[1])
    squares = f.square().mean(1)
    if gain_sums is None:
        inverse = torch.rsqrt(squares + eps)
    else:
        mean = f.mean(1)
        inverse = torch.rsqrt((squares - mean * mean).clamp_min(0.0) + eps)
        shift = (mean * inverse)[:, None] * gain_sums
        bias = -shift if bias is None else bias - shift
    return epilogue_ref(
        matmul(q, qweight).float(),
        row_scale=scale * inverse,
        col_scale=weight_scale,
        bias=bias,
        activation=activation,
        out_dtype=x.dtype,
    )


def residual_linear_ref(
    x: Tensor,
    x_absmax: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    matmul: Callable[[Tensor, Tensor], Tensor] = matmul_s8,
) -> Tensor:
    """``rne(f32(acc) * s_x[m] * s_w[n] + b[n] + residual[m, n])`` of rows whose largest magnitudes are given.

    Args (the others as `normed_linear_ref`):
        x_absmax: float32 ``[M]``, ``max |x[m]|``.
        residual: ``[M, N]`` of x's dtype.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: bitwise.
    """
    q, scale = quantize_by_absmax_ref(x.float(), x_absmax, qweight.shape[1])
    return epilogue_ref(
        matmul(q, qweight).float(),
        row_scale=scale,
        col_scale=weight_scale,
        bias=bias,
        activation="none",
        residual=residual,
        out_dtype=x.dtype,
    )
