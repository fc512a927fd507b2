"""Weights in 8-bit floats with 4 bits of exponent and 3 of fraction (e4m3), and a scale for each row or each block.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.int8 import weight_qparams
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
