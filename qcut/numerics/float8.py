"""8-bit floats with 4 bits of exponent and 3 of fraction (e4m3), as weights and as tokens.

Weights have a scale for each row or each block, tokens have a scale each or one for all.

Float arithmetic is float32, one rounded operation at a time, in the order the formulas are written; ``e4m3`` rounds to
the nearest value, of two as near to that with an even fraction, and magnitudes beyond 448 to 448.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qcut.numerics import int16
from qcut.numerics.int8 import epilogue_ref, weight_qparams
from qcut.schemes import FP8_BLOCK, FP8_UNIT_ROWS

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value; there is no infinity."""
_CHUNK_ELEMENTS = 1 << 24


def quantize_weight(w: Tensor, *, row_absmax: Tensor | None = None, layer: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a weight symmetrically per channel.

    ``q`` is the e4m3 nearest to ``f32(W[n, k]) / scale[n]``, of two as near that with an even fraction, where
    ``scale[n] = max_k |f32(W[n, k])| / 448``, and 1 where that is 0.

    Args and Raises: as `qcut.numerics.int8.weight_qparams`.

    Returns:
        ``q`` float8_e4m3fn ``[N, K]`` and ``scale`` float32 ``[N]``, on the weight's device.

    Exactness: bitwise.
    """
    scale = weight_qparams(w, row_absmax=row_absmax, layer=layer, most=LARGEST)
    q = torch.empty(w.shape, dtype=E4M3, device=w.device)
    rows = max(1, _CHUNK_ELEMENTS // w.shape[1])
    for w_i, q_i, scale_i in zip(w.split(rows), q.split(rows), scale.split(rows), strict=True):
        q_i.copy_((w_i.float() / scale_i[:, None]).clamp_(-LARGEST, LARGEST))
    return q, scale


def quantize_blocks(w: Tensor, *, layer: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a weight symmetrically in blocks of `FP8_BLOCK` rows and columns, each as `quantize_weight` a row.

    Args and Raises: as `qcut.numerics.int8.weight_qparams`.

    Returns:
        ``q`` float8_e4m3fn ``[N, K]`` and ``scale`` float32 ``[ceil(N / 16), ceil(K / 128)]``, see `unit_scales`.

    Exactness: bitwise.
    """
    n, k = w.shape
    rows, columns = -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
    whole = w.new_zeros((rows * FP8_BLOCK, columns * FP8_BLOCK))
    whole[:n, :k] = w
    blocks = whole.view(rows, FP8_BLOCK, columns, FP8_BLOCK).transpose(1, 2).flatten(2).flatten(0, 1)
    q, scale = quantize_weight(blocks, layer=layer)
    q = q.view(torch.int8).view(rows, columns, FP8_BLOCK, FP8_BLOCK).transpose(1, 2).reshape(whole.shape)
    return q[:n, :k].contiguous().view(E4M3), unit_scales(scale.view(rows, columns), FP8_BLOCK, n)


def unit_scales(scale: Tensor, rows: int, n: int) -> Tensor:
    """Scales of each `FP8_UNIT_ROWS` rows.

    Args:
        scale: ``[ceil(N / rows), columns]``.
        rows: rows of a scale, a multiple of `FP8_UNIT_ROWS`.
        n: N.
    """
    return scale.repeat_interleave(rows // FP8_UNIT_ROWS, 0)[: -(-n // FP8_UNIT_ROWS)].contiguous()


def of_weights(scale: Tensor, n: int, k: int) -> Tensor:
    """What each weight ``[N, K]`` has of scales ``[N]``, which is ``[N, 1]``, or of units."""
    if scale.dim() == 1:
        return scale[:, None]
    return scale.repeat_interleave(FP8_BLOCK, 1)[:, :k].repeat_interleave(FP8_UNIT_ROWS, 0)[:n]


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """float32 ``[N, K]``: ``f32(q[n, k]) * scale``, rounded once.

    Args:
        q: float8_e4m3fn ``[N, K]``.
        scale: float32 ``[N]``, or ``[ceil(N / 16), ceil(K / 128)]``.
    """
    return q.float() * of_weights(scale, *q.shape)


def quantize_tokens_ref(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """Quantizes each row by its own largest magnitude.

    ``scale[m] = max(max_k |f32(x[m, k])| / 448, 2**-126)``, ``q = e4m3(f32(x) * (1 / scale[m]))``. The product with the
    reciprocal moves a quotient by an ulp of float32 or two, and is one operation where a division is ten.

    A row that holds NaN or Inf gets the scale NaN and zeros, so that its output row is NaN: one bad token does not
    change the others.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; M may be 0.
        k_padded: columns of ``q``, at least K; those past K are 0.

    Returns:
        ``q`` float8_e4m3fn ``[M, k_padded]`` and ``scale`` float32 ``[M]``.

    Exactness: bitwise.
    """
    x = x.float()
    absmax = x.abs().amax(1)
    scale = int16.scale_of(absmax, LARGEST)
    finite = absmax.isfinite()
    inverse = torch.ones_like(scale) / scale
    q = _rounded((x * inverse[:, None]).masked_fill_(~finite[:, None], 0.0), k_padded)
    return q, scale.masked_fill_(~finite, math.nan)


def static_scale(lo: float, hi: float) -> float:
    """The scale of a calibrated range: that of `qcut.numerics.int16.static_scale` for magnitudes up to 448."""
    return int16.static_scale(lo, hi, LARGEST)


def quantize_tensor_ref(x: Tensor, scale: float, k_padded: int) -> Tensor:
    """Quantizes all tokens with one calibrated scale.

    ``q = e4m3(f32(x) * (1 / scale))``; NaN stays NaN, and ±Inf becomes ±448.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; M may be 0.
        scale: positive, from 2**-126 on.
        k_padded: columns of ``q``, at least K; those past K are 0.

    Returns:
        float8_e4m3fn ``[M, k_padded]``.

    Exactness: bitwise.
    """
    one = torch.ones((), device=x.device, dtype=torch.float32)
    return _rounded(x.float() * (one / torch.full_like(one, scale)), k_padded)


def _rounded(v: Tensor, k_padded: int) -> Tensor:
    """e4m3 of float32 ``[M, K]``, saturating, with zeros up to ``k_padded`` columns."""
    q = torch.zeros(v.shape[0], k_padded, dtype=torch.int8, device=v.device).view(E4M3)
    q[:, : v.shape[1]] = v.clamp(-LARGEST, LARGEST)
    return q


def dynamic_linear_ref(
    x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """``y = act(sum_k(q[m, k] * qweight[n, k]) * s_x[m] * s_w[n] + b[n])`` on e4m3 tokens with a scale each.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        qweight: finite float8_e4m3fn ``[N, padded_k(K)]``, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]`` or None.
        activation: see `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: every product is exact in float32; the sum is float32 and its order is the BLAS library's: an error of at
    most ``K * 2**-23 * sum_k |q * qweight|`` before the scales. A row's result does not depend on the other rows'
    values.
    """
    q, x_scale = quantize_tokens_ref(x, qweight.shape[1])
    return _product(q, qweight, x_scale, weight_scale, bias, activation, x.dtype)


def static_linear_ref(
    x: Tensor, qweight: Tensor, col_scale: Tensor, bias: Tensor | None, x_scale: float, activation: str
) -> Tensor:
    """``y = act(sum_k(q[m, k] * qweight[n, k]) * col_scale[n] + b[n])`` on e4m3 tokens with one calibrated scale.

    Args (the others, Returns and Exactness as `dynamic_linear_ref`):
        col_scale: float32 ``[N]``, the rounded product ``x_scale * weight_scale[n]``.
        x_scale: scale of the tokens, from 2**-126 on.
    """
    q = quantize_tensor_ref(x, x_scale, qweight.shape[1])
    return _product(q, qweight, None, col_scale, bias, activation, x.dtype)


def _product(
    q: Tensor,
    qweight: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    v = q.float() @ qweight.float().t()
    return epilogue_ref(v, row_scale=row_scale, col_scale=col_scale, bias=bias, activation=activation, out_dtype=dtype)
