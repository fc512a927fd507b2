"""Keys and values of 4 bits: Hadamard-rotated rows, and 16 levels with a scale and a zero point for each row.

A row of d columns, a power of two, is *rotated* first: ``y = H (s * x) / sqrt(d)`` with the Walsh-Hadamard matrix H and
fixed signs s. Outlying columns of x are spread over all columns of y; the distribution of y is close to a normal one.
Products of two rotated rows are those of the rows: queries are rotated with the keys, and weighted values rotated back.

A rotated row becomes codes c from 0 to 15 and a word of 16 bits that holds its scale and zero point::

    y  ~  scale * (c - m)        m = 5.5 + z / 8, z from 0 to 31

The word's upper 11 bits are those of a float16 without its sign and its last four fraction bits, the lower 5 are z.

Keys may be *guided*. What matters of a key's error e is the error of scores, ``q . e`` for the queries q to come, and
these lie along few directions. The guide of a head of keys (`guide_of`) holds the eight main directions of its queries,
and the keys' mean, which is taken away before a key is rounded: what all keys have in common moves all scores of a
query alike, and the softmax does not see it. A few codes of a rounded key then move to their other neighbour, so that
errors cancel along the directions (`quantize_rows_ref`).

Float arithmetic is float32, one rounded operation at a time; ``rne`` rounds half to even.

Source: docs/schemes.md, section 5.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics.hadamard import walsh_hadamard

HEADS = (32, 64, 128, 256)
"""Columns that a row may have."""
SHRINKS = (1.0, 0.95, 0.9)
"""Parts of a row's range that its levels may span."""
DIRECTIONS = 8
"""Of the queries that read a head of keys, in a guide."""
MOVES = 4
"""Codes of a guided row that may move."""
_UNIT = 8
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
    return torch.tensor(found, dtype=torch.float32, device="cpu")


def check_head(d: int) -> None:
    """Check the columns of a row.

    Raises:
        ConfigError: not one of `HEADS`.
    """
    if d not in HEADS:
        raise ConfigError(f"a 4-bit cache of heads of {d} columns; allowed: {', '.join(map(str, HEADS))}")


def rotate(x: Tensor) -> Tensor:
    """Turn rows: ``H (s * x) / sqrt(d)``, the transform's additions first.

    Args:
        x: floating point ``[..., d]``, d one of `HEADS`.

    Returns:
        float32 ``[..., d]``.

    Exactness: bitwise; butterflies of neighbours first, as `walsh_hadamard` has them.
    """
    d = x.shape[-1]
    return walsh_hadamard(x.float() * _signs(d).to(x.device)) * d**-0.5


def rotate_back(y: Tensor) -> Tensor:
    """The inverse of `rotate`, float32 ``[..., d]``: ``s * (H y) / sqrt(d)``."""
    d = y.shape[-1]
    return walsh_hadamard(y.float()) * (_signs(d) * d**-0.5).to(y.device)


def quantize_rows_ref(y: Tensor, guide: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rotated rows to 4 bits.

    With ``lo`` and ``hi`` the least and the largest element of a row, ``range = max(hi - lo, 1.6 * max(hi, -lo))``, and
    for each f of `SHRINKS`::

        scale = range * (f / 15), as float16, rounded up or down to six fraction bits (ties up), at most 63,488
        inv = 1 / scale, 0 where the scale is 0
        z = clamp(rne((2 - (hi + lo) / 2 * inv) * 8), 0, 31)
        t = y * inv + (5.5 + z / 8)
        c = clamp(rne(t), 0, 15)
        loss = sum(rne(1024 * clamp(t - c, -2, 2)) ** 2) * (scale * scale)

    the sum in integers. The f of least loss, the first of equals, is the row's.

    With a guide, its mean is subtracted from y first. Afterwards, with ``e = rne(1024 * clamp(t - c, -2, 2))`` and the
    guide's directions u, their strengths s, and the cost h of each column::

        p = u . e                                           of each direction, in integers
        g = 8 e + u clamp(rne(p * s), -32767, 32767)        of each column, in integers
        gain = 2 |g| - h, at most 2 ** 22 - 1               0 where c + sign(g) is no code; sign(0) is 1

    and the code of the largest positive gain, of the first column among equals, becomes ``c + sign(g)``, e less 1024
    times that sign; and so on, `MOVES` times at most. The words do not change.

    Args:
        y: float32 ``[R, d]``, d even.
        guide: of H heads, see `guide_of`; row r is one of head ``r % H``. None: each code is the nearest.

    Returns:
        Codes, uint8 ``[R, d / 2]``, the code of column 2 i in the lower half of byte i; words, int16 ``[R]``. A row
        that holds NaN or Inf gets a scale of NaN and zeros.

    Exactness: bitwise.
    """
    if guide is not None:
        y = y - _fields(guide).mean.repeat(len(y) // len(guide), 1)
    lo, hi = y.amin(1, keepdim=True), y.amax(1, keepdim=True)
    finite = y.isfinite().all(1, keepdim=True)
    y, lo, hi = (v.masked_fill(~finite, 0.0) for v in (y, lo, hi))
    span = torch.maximum(hi - lo, torch.maximum(hi, -lo) * 1.6).abs()  # 0 has no sign then
    center = (hi + lo) * 0.5
    least = torch.full_like(lo, torch.inf)
    codes, words = torch.zeros_like(y), torch.zeros_like(lo, dtype=torch.int32)
    steps = torch.zeros_like(y, dtype=torch.int32)
    for shrink in SHRINKS:
        bits = (span * (shrink / 15.0)).to(torch.float16).view(torch.int16).int()
        bits = ((bits + 8) & 0xFFF0).clamp(max=_LARGEST_SCALE)
        scale = bits.to(torch.int16).view(torch.float16).float()
        inv = torch.where(scale == 0, 0.0, 1.0 / scale)
        z = ((2.0 - center * inv) * 8.0).round().clamp(0, 31)
        t = y * inv + (z * 0.125 + 5.5)
        c = t.round().clamp(0, 15)
        off = ((t - c).clamp(-2, 2) * 1024.0).round().int()
        loss = off.square().sum(1, keepdim=True, dtype=torch.int32).float() * (scale * scale)
        better = loss < least
        least = torch.where(better, loss, least)
        codes, steps = torch.where(better, c, codes), torch.where(better, off, steps)
        words = torch.where(better, bits << 1 | z.int(), words)
    if guide is not None:
        codes = _moved(codes, steps, _fields(guide))
    words = torch.where(finite, words, _NAN_WORD)
    codes = codes.masked_fill(~finite, 0.0).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, words[:, 0].to(torch.int16)


def _moved(codes: Tensor, steps: Tensor, guide: _Guide) -> Tensor:
    """Codes of rows, float32 ``[R, d]`` as given, after the moves that `quantize_rows_ref` describes."""
    heads, d, _ = guide.directions.shape
    shape = (-1, heads, d)
    c, e = codes.reshape(shape).double(), steps.reshape(shape).double()
    u, column = guide.directions.double(), torch.arange(d, device=codes.device, dtype=torch.int64)
    for _ in range(MOVES):
        p = torch.einsum("rhd,hdk->rhk", e, u)  # integers below 2 ** 26, as those that follow: float64 is exact
        q = (p.float() * guide.strengths).round().clamp(-32767, 32767).double()
        g = _UNIT * e + torch.einsum("rhk,hdk->rhd", q, u)
        sign = torch.where(g < 0, -1.0, 1.0).double()
        gain = (2 * g.abs() - guide.costs).clamp(max=2.0**22 - 1)
        gain = gain.masked_fill((c + sign < 0) | (c + sign > 15), 0.0).clamp(min=0.0)
        best, at = (gain * 256 + (255 - column)).max(2, keepdim=True)
        move = torch.where(best >= 256, sign.gather(2, at), 0.0)
        c.scatter_add_(2, at, move)
        e.scatter_add_(2, at, -1024 * move)
    return c.view(codes.shape).float()


class _Guide(NamedTuple):
    """What a guide of H heads holds.

    Attributes:
        directions: int8 ``[H, d, DIRECTIONS]``.
        mean: float32 ``[H, d]``.
        costs: int32 ``[H, d]``.
        strengths: float32 ``[H, DIRECTIONS]``.
    """

    directions: Tensor
    mean: Tensor
    costs: Tensor
    strengths: Tensor


def _fields(guide: Tensor) -> _Guide:
    d = guide.shape[1] - 2
    columns = guide[:, :d]
    return _Guide(
        columns[:, :, :2].contiguous().view(torch.int8),
        columns[:, :, 2].contiguous().view(torch.float32),
        columns[:, :, 3],
        guide[:, d:].reshape(len(guide), DIRECTIONS).view(torch.float32),
    )


def guide_of(moments: Tensor, mean: Tensor) -> Tensor:
    """Return the guide of the keys of some heads.

    The loss of a row's error e is ``e . M e / m``, M the second moment of queries and m the mean of its eigenvalues but
    the `DIRECTIONS` largest: ``e . e`` and what the eigenvectors v of these add, ``(l / m - 1) (v . e) ** 2`` for an
    eigenvalue l. Directions are ``sqrt(l / m - 1) v`` in units of 127ths of their largest element a, strengths ``8 (a /
    127) ** 2``, and a column's cost 8192 times the loss of an error of 1 in only this column.

    Args:
        moments: ``[H, d, d]``, sums of ``q q^T`` over the rotated queries of all heads that read a head of keys.
        mean: ``[H, d]``, of rotated keys.

    Returns:
        int32 ``[H, d + 2, 4]``: of each column eight directions of one byte, the float32 mean and the cost; then the
        eight float32 strengths. Where moments or mean are not finite, or nothing stands out, the head's directions or
        mean are 0.

    Exactness: eigenvectors are those of float64 on the CPU.
    """
    moments, mean = moments.double().cpu(), mean.double().cpu()
    heads, d, _ = moments.shape
    known = moments.isfinite().flatten(1).all(1)
    values, vectors = torch.linalg.eigh(
        torch.where(known[:, None, None], moments, torch.eye(d, dtype=torch.float64, device="cpu"))
    )
    rest = values[:, : d - DIRECTIONS].mean(1, keepdim=True).clamp(min=1e-6 * values[:, -1:].clamp(min=1e-30))
    over = (values[:, d - DIRECTIONS :] / rest - 1).clamp(0, 4095)
    directions = vectors[:, :, d - DIRECTIONS :] * over.sqrt()[:, None]
    unit = directions.abs().amax(1, keepdim=True) / 127
    u = torch.where(unit > 0, directions / unit, 0.0).round()
    guide = torch.zeros(heads, d + 2, 4, dtype=torch.int32, device="cpu")
    guide[:, :d, :2] = u.to(torch.int8).contiguous().view(torch.int32)
    centered = torch.where(mean.isfinite().all(1, keepdim=True), mean, 0.0)
    guide[:, :d, 2] = centered.float().contiguous().view(torch.int32)
    guide[:, :d, 3] = (1024 * _UNIT * (1 + (unit * u).square().sum(2))).round().int()
    guide[:, d:] = (_UNIT * unit.square()).float().view(heads, 2, 4).contiguous().view(torch.int32)
    return guide


def dequantize_rows_ref(codes: Tensor, words: Tensor) -> Tensor:
    """Turned rows of codes ``[..., d / 2]`` and words ``[...]``, float32 ``[..., d]``.

    Exactness: bitwise; ``c - m`` is exact.
    """
    wide = words.int() & 0xFFFF
    scale = (wide >> 1 & 0x7FF0).to(torch.int16).view(torch.float16).float()
    middle = (wide & 31).float() * 0.125 + 5.5
    c = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float()
    return (c - middle[..., None]) * scale[..., None]
