"""The codebook of pairs: an index of 8 bits stands for the values of two neighbouring columns.

Bits 0 to 5 of an index number a point with positive coordinates, bit 6 is the sign of the first value and bit 7 that of
the second (1: negative). In tensors of indices, which have an entry for each column, the first column of a pair has the
lower four bits and the second the upper four: packed to 4 bits an entry, a pair is a byte. Values are float32
``[256, 2]``, where other codebooks are ``[2**bits]``.

Per value, the squared error for normally distributed values is 0.81 of that of the 16 values of
`qcut.codebooks.lloyd_max`.
"""

from __future__ import annotations

import torch
from torch import Tensor

POINTS = 64
"""Points with positive coordinates."""
COUNT = 4 * POINTS
"""Pairs of values."""
QUADRANT: tuple[tuple[float, float], ...] = (
    # fmt: off
    (0.1067, 0.0923), (0.1144, 0.2859), (0.1147, 0.4930), (0.1181, 0.9531),
    (0.1181, 0.7119), (0.1322, 1.2220), (0.1445, 1.4974), (0.1678, 1.8055),
    (0.1781, 2.1766), (0.2538, 2.6594), (0.3116, 0.1380), (0.3292, 0.3978),
    (0.3435, 0.6523), (0.3551, 0.9353), (0.3994, 1.2331), (0.4439, 1.5539),
    (0.4800, 3.2858), (0.5082, 1.9009), (0.5107, 0.0903), (0.5299, 0.2952),
    (0.5583, 0.5286), (0.5652, 2.2841), (0.5802, 0.7818), (0.6229, 1.0469),
    (0.6882, 1.3487), (0.7259, 0.1163), (0.7668, 0.3524), (0.7849, 1.6859),
    (0.8053, 0.5985), (0.8546, 0.8564), (0.8988, 2.6279), (0.9090, 1.1361),
    (0.9245, 2.0724), (0.9536, 0.1260), (1.0154, 0.3793), (1.0205, 1.4516),
    (1.0722, 0.6397), (1.1509, 0.9187), (1.2006, 0.1355), (1.2043, 1.7878),
    (1.2178, 1.1998), (1.2860, 0.4109), (1.3595, 0.7092), (1.4026, 2.2806),
    (1.4292, 1.4614), (1.4776, 0.1389), (1.4800, 3.0188), (1.5140, 1.0506),
    (1.5773, 0.4283), (1.6563, 0.7391), (1.6741, 1.8431), (1.8020, 0.1580),
    (1.8124, 1.3463), (1.9218, 0.5019), (1.9333, 0.9346), (2.1570, 2.4154),
    (2.1790, 1.7272), (2.1849, 0.1947), (2.2952, 0.6576), (2.2995, 1.2008),
    (2.6574, 0.2619), (2.7725, 0.8995), (2.9282, 1.6724), (3.3385, 0.4658),
    # fmt: on
)
"""The points with positive coordinates, as `qcut.codebooks.lloyd_pairs` makes them."""

_CHUNK = 1 << 16  # pairs that are compared with all points at a time


def codebook(device: torch.device | str | None = None) -> Tensor:
    """float32 ``[256, 2]``: the pair of values of each index."""
    return with_signs(torch.tensor(QUADRANT, dtype=torch.float32, device=device))


def with_signs(quadrant: Tensor) -> Tensor:
    """``[256, 2]``: points ``[64, 2]`` with positive coordinates, then the same with other signs."""
    signs = torch.tensor([[1, 1], [-1, 1], [1, -1], [-1, -1]], dtype=quadrant.dtype, device=quadrant.device)
    return (signs[:, None] * quadrant).flatten(0, 1)


def are_pairs(values: Tensor) -> bool:
    """Whether the values of a codebook are pairs."""
    return values.dim() == 2


def are_symmetric(values: Tensor) -> bool:
    """Whether pairs ``[256, 2]`` are positive, finite points and the same with other signs."""
    quadrant = values[:POINTS]
    return bool(quadrant.isfinite().all() and (quadrant > 0).all()) and torch.equal(values, with_signs(quadrant))


def spacing(values: Tensor) -> float:
    """The least distance of two pairs."""
    return float(torch.pdist(values).min())


def join(indices: Tensor) -> Tensor:
    """uint8 ``[..., K / 2]``: an index for each pair, from entries ``[..., K]`` for each column."""
    return indices[..., ::2] | indices[..., 1::2] << 4


def split(joined: Tensor) -> Tensor:
    """uint8 ``[..., K]``: entries for each column, from an index ``[..., K / 2]`` of any integer dtype for each pair."""
    return torch.stack((joined & 15, joined >> 4), -1).flatten(-2).to(torch.uint8)


def look_up(values: Tensor, indices: Tensor) -> Tensor:
    """The values that indices stand for.

    Args:
        values: a codebook, ``[2**bits]``, or ``[256, 2]`` for pairs.
        indices: uint8 ``[..., K]``; with pairs, K is even.

    Returns:
        ``[..., K]`` of the codebook's dtype.
    """
    return values[join(indices).int()].flatten(-2) if are_pairs(values) else values[indices.int()]


def nearest(points: Tensor, values: Tensor) -> Tensor:
    """The index of the pair that is nearest to each point.

    Args:
        points: float32 ``[..., 2]``.
        values: ``[256, 2]``, of the same dtype, as `with_signs` makes them.

    Returns:
        uint8 ``[...]``. Of pairs that are equally near, the one with the lowest index.
    """
    flat = points.reshape(-1, 2)
    x, y = values[:POINTS].t()
    half = (x.square() + y.square()) / 2
    out = torch.empty(len(flat), dtype=torch.uint8, device=flat.device)
    for first in range(0, len(flat), _CHUNK):
        part = flat[first : first + _CHUNK]
        size = part.abs()
        # The nearest has the largest <point, pair> - |pair|^2 / 2; no matrix product, whose precision may be set low.
        score = torch.addcmul(torch.addcmul(-half, size[:, :1], x), size[:, 1:], y)
        negative = (part < 0).to(torch.uint8)
        out[first : first + _CHUNK] = score.argmax(1).to(torch.uint8) | negative[:, 0] << 6 | negative[:, 1] << 7
    return out.view(points.shape[:-1])


def best(wanted: Tensor, scale: Tensor, metric: Tensor, values: Tensor) -> Tensor:
    """The indices with the least error under a metric: ``(wanted - scale c) metric (wanted - scale c)^T`` for pairs c.

    Args:
        wanted: float32 ``[R, 2]``.
        scale: ``[R]``, the factor of values.
        metric: ``[R, 3]`` or ``[1, 3]``: the upper left, the upper right and the lower right number of a symmetric
            matrix.
        values: ``[256, 2]``.

    Returns:
        int64 ``[R]``.
    """
    upper, mixed, lower = metric.unbind(1)
    x, y = wanted.unbind(1)
    half = -scale / 2
    terms = (upper * x + mixed * y, mixed * x + lower * y, half * upper, 2 * half * mixed, half * lower)
    c, d = values.unbind(1)
    return (torch.stack(terms, 1) @ torch.stack((c, d, c * c, c * d, d * d))).argmax(1)


def toward(start: Tensor, points: Tensor, values: Tensor, share: float) -> Tensor:
    """Points moved toward the pairs of given indices, as far as lies in a share of these pairs' cells.

    Args:
        start: uint8 ``[...]``, indices.
        points: float32 ``[..., 2]``.
        values: ``[256, 2]``.
        share: of the way from the pair to its cell's border.

    Returns:
        ``[..., 2]``: between pair and point, and the point itself where that lies within.
    """
    chosen, flat = start.flatten().int(), points.reshape(-1, 2)
    out = torch.empty_like(flat)
    between = values[None] - values[:, None]  # from each pair to each other
    half = between.square().sum(2) / 2
    for first in range(0, len(flat), _CHUNK // 4):
        part = slice(first, first + _CHUNK // 4)
        pair = values[chosen[part]]
        step = flat[part] - pair
        along = (between[chosen[part]] * step[:, None]).sum(2)
        most = torch.where(along > 0, share * half[chosen[part]] / along, torch.inf).amin(1)
        out[part] = pair + step * most.clamp(max=1)[:, None]
    return out.view(points.shape)
