"""Weights in 8-bit floats with 4 bits of exponent and 3 of fraction (e4m3), and a scale for each row.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.int8 import weight_qparams

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
