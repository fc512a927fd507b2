"""Keys and values of 4 bits: rows turned by a rotation, and 16 levels with a scale and a zero point for each row.

A row of d columns, a power of two, is *turned* first: ``y = H (s * x) / sqrt(d)`` with the Walsh-Hadamard matrix H and
fixed signs s. Outlying columns of x are spread over all columns of y, whose distribution is close to a normal one.
Products of two turned rows are those of the rows: queries are turned with the keys, and weighted values turned back.

A turned row becomes codes c from 0 to 15 and a word of 16 bits that holds its scale and zero point::

    y  ~  scale * (c - m)        m = 5.5 + z / 8, z from 0 to 31

The word's upper 11 bits are those of a float16 without its sign and its last four fraction bits, the lower 5 are z.

Float arithmetic is float32, one rounded operation at a time; ``rne`` rounds half to even.

Source: docs/schemes.md, section 5.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics.hadamard import walsh_hadamard

HEADS = (32, 64, 128, 256)
"""Columns that a row may have."""
SHRINKS = (1.0, 0.95, 0.9)
"""Parts of a row's range that its levels may span."""
_LARGEST_SCALE = 0x7BF0
_NAN_WORD = 0x7E00 << 1 & 0xFFE0


@lru_cache
def _signs(d: int) -> Tensor:
    """Fixed signs +1 and -1, float32 ``[d]``: the last bit of a hash of each column."""
    found = []
    for column in range(d):
        h = column * 0x9E3779B1 & 0xFFFFFFFF
        h = (h ^ h >> 15) * 0x85EBCA6B & 0xFFFFFFFF
        found.append(-1.0 if (h ^ h >> 13) & 1 else 1.0)
    return torch.tensor(found)


def check_head(d: int) -> None:
    """Check the columns of a row.

    Raises:
        ConfigError: not one of `HEADS`.
    """
    if d not in HEADS:
        raise ConfigError(f"a 4-bit cache of heads of {d} columns; allowed: {', '.join(map(str, HEADS))}")


def turn(x: Tensor) -> Tensor:
    """Turn rows: ``H (s * x) / sqrt(d)``, the transform's additions first.

    Args:
        x: floating point ``[..., d]``, d one of `HEADS`.

    Returns:
        float32 ``[..., d]``.

    Exactness: bitwise; butterflies of neighbours first, as `walsh_hadamard` has them.
    """
    d = x.shape[-1]
    return walsh_hadamard(x.float() * _signs(d).to(x.device)) * d**-0.5


def turn_back(y: Tensor) -> Tensor:
    """The inverse of `turn`, float32 ``[..., d]``: ``s * (H y) / sqrt(d)``."""
    d = y.shape[-1]
    return walsh_hadamard(y.float()) * (_signs(d) * d**-0.5).to(y.device)


def quantize_rows_ref(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize turned rows to 4 bits.

    With ``lo`` and ``hi`` the least and the largest element of a row, ``range = max(hi - lo, 1.6 * max(hi, -lo))``, and
    for each f of `SHRINKS`::

        scale = range * (f / 15), as float16, rounded up or down to six fraction bits (ties up), at most 63,488
        inv = 1 / scale, 0 where the scale is 0
        z = clamp(rne((2 - (hi + lo) / 2 * inv) * 8), 0, 31)
        t = y * inv + (5.5 + z / 8)
        c = clamp(rne(t), 0, 15)
        loss = sum(rne(1024 * clamp(t - c, -2, 2)) ** 2) * (scale * scale)

    the sum in integers. The f of least loss, the first of equals, is the row's.

    Args:
        y: float32 ``[R, d]``, d even.

    Returns:
        Codes, uint8 ``[R, d / 2]``, the code of column 2 i in the lower half of byte i; words, int16 ``[R]``. A row
        that holds NaN or Inf gets a scale of NaN and zeros.

    Exactness: bitwise.
    """
    lo, hi = y.amin(1, keepdim=True), y.amax(1, keepdim=True)
    finite = y.isfinite().all(1, keepdim=True)
    y, lo, hi = (v.masked_fill(~finite, 0.0) for v in (y, lo, hi))
    span = torch.maximum(hi - lo, torch.maximum(hi, -lo) * 1.6).abs()  # 0 has no sign then
    center = (hi + lo) * 0.5
    least = torch.full_like(lo, torch.inf)
    codes, words = torch.zeros_like(y), torch.zeros_like(lo, dtype=torch.int32)
    for shrink in SHRINKS:
        bits = (span * (shrink / 15.0)).to(torch.float16).view(torch.int16).int()
        bits = ((bits + 8) & 0xFFF0).clamp(max=_LARGEST_SCALE)
        scale = bits.to(torch.int16).view(torch.float16).float()
        inv = torch.where(scale == 0, 0.0, 1.0 / scale)
        z = ((2.0 - center * inv) * 8.0).round().clamp(0, 31)
        t = y * inv + (z * 0.125 + 5.5)
        c = t.round().clamp(0, 15)
        squares = ((t - c).clamp(-2, 2) * 1024.0).round().int().square().sum(1, keepdim=True, dtype=torch.int32)
        loss = squares.float() * (scale * scale)
        better = loss < least
        least = torch.where(better, loss, least)
        codes = torch.where(better, c, codes)
        words = torch.where(better, bits << 1 | z.int(), words)
    words = torch.where(finite, words, _NAN_WORD)
    codes = codes.masked_fill(~finite, 0.0).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, words[:, 0].to(torch.int16)


def dequantize_rows_ref(codes: Tensor, words: Tensor) -> Tensor:
    """Turned rows of codes ``[..., d / 2]`` and words ``[...]``, float32 ``[..., d]``.

    Exactness: bitwise; ``c - m`` is exact.
    """
    wide = words.int() & 0xFFFF
    scale = (wide >> 1 & 0x7FF0).to(torch.int16).view(torch.float16).float()
    middle = (wide & 31).float() * 0.125 + 5.5
    c = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float()
    return (c - middle[..., None]) * scale[..., None]
