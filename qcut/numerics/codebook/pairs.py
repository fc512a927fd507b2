"""The codebook of pairs: an index of 8 bits stands for the values of two neighbouring columns.

Bits 0 to 5 of an index number a point with positive coordinates, bit 6 is the sign of the first value and bit 7 that of
the second (1: negative). In tensors of indices, which have an entry for each column, the first column of a pair has the
lower four bits and the second the upper four: packed to 4 bits an entry, a pair is a byte. Values are float32
``[256, 2]``, where other codebooks are ``[2**bits]``.

Per value, the squared error for normally distributed values is 0.81 of that of the 16 values of
`qcut.numerics.codebook.lloyd_max`.
"""

from __future__ import annotations

import torch
from torch import Tensor

POINTS = 64
"""Points with positive coordinates."""
COUNT = 4 * POINTS
"""Pairs of values."""
QUADRANT: tuple[tuple[float, float], ...] = (
    (0.0913, 0.3870),
    (0.1072, 0.6405),
    (0.1088, 0.1154),
    (0.1151, 0.8976),
    (0.1296, 1.1702),
    (0.1441, 1.4526),
    (0.1588, 1.7743),
    (0.1746, 2.1528),
    (0.2482, 2.6418),
    (0.2625, 0.2821),
    (0.3079, 0.5074),
    (0.3321, 0.7476),
    (0.3592, 1.0026),
    (0.3593, 0.0968),
    (0.4088, 1.2724),
    (0.4473, 1.5719),
    (0.4675, 3.2721),
    (0.4800, 0.3227),
    (0.5068, 1.9017),
    (0.5368, 0.5613),
    (0.5591, 2.2815),
    (0.5707, 0.8103),
    (0.6015, 0.1121),
    (0.6323, 1.0746),
    (0.7057, 1.3705),
    (0.7084, 0.3502),
    (0.7753, 0.5989),
    (0.8046, 1.6957),
    (0.8294, 0.8557),
    (0.8462, 0.1198),
    (0.8921, 2.6261),
    (0.9194, 1.1438),
    (0.9267, 2.0793),
    (0.9516, 0.3638),
    (1.0324, 0.6169),
    (1.0499, 1.4549),
    (1.0954, 0.8909),
    (1.1076, 0.1225),
    (1.2200, 0.3693),
    (1.2258, 1.8030),
    (1.2403, 1.1854),
    (1.3086, 0.6296),
    (1.3783, 0.9053),
    (1.4006, 0.1304),
    (1.4103, 2.2968),
    (1.4539, 1.4731),
    (1.4667, 3.0359),
    (1.5287, 0.4026),
    (1.6132, 1.1059),
    (1.6277, 0.7128),
    (1.7122, 1.8633),
    (1.7357, 0.1490),
    (1.8769, 0.4812),
    (1.8818, 1.3837),
    (1.9417, 0.9050),
    (2.1229, 0.1818),
    (2.1887, 2.4346),
    (2.2572, 0.6144),
    (2.2677, 1.7375),
    (2.3209, 1.1617),
    (2.6011, 0.2402),
    (2.7332, 0.8247),
    (2.9999, 1.5629),
    (3.2927, 0.4323),
)
"""The points with positive coordinates, as `qcut.numerics.codebook.fitting.lloyd_pairs` makes them."""

_CHUNK = 1 << 16  # pairs that are compared with points at a time
_FEW = 1 << 12  # pairs that are compared with all points in less time than `Squares` takes to make
_SQUARES = 64  # on a side


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


SYMMETRIC = "finite points, the same with other signs"
"""What a codebook of pairs has to hold, for messages."""


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
    """uint8 ``[..., K]``: entries for each column, of indices ``[..., K / 2]`` of any integer dtype for each pair."""
    return torch.stack((joined & 15, joined >> 4), -1).flatten(-2).to(torch.uint8)


def look_up(values: Tensor, indices: Tensor) -> Tensor:
    """The values that indices stand for.

    Args:
        values: a codebook, ``[2**bits]``, or ``[256, 2]`` for pairs.
        indices: uint8 ``[..., K]``; with pairs, K is even.

    Returns:
        ``[..., K]`` of the codebook's dtype.
    """
    chosen = join(indices) if are_pairs(values) else indices
    # As ``values[chosen]``, which is slower on a CPU.
    return values.index_select(0, chosen.flatten().int()).view(indices.shape)


def nearest(points: Tensor, values: Tensor) -> Tensor:
    """The index of the pair that is nearest to each point.

    Args:
        points: float32 ``[..., 2]``.
        values: ``[256, 2]``, of the same dtype, as `with_signs` makes them.

    Returns:
        uint8 ``[...]``. Of pairs that are equally near, the one with the lowest index.
    """
    flat = points.reshape(-1, 2)
    quadrant = values[:POINTS]
    squares = Squares(quadrant) if len(flat) >= _FEW and flat.device.type == "cpu" else None
    out = torch.empty(len(flat), dtype=torch.uint8, device=flat.device)
    for first in range(0, len(flat), _CHUNK):
        part = flat[first : first + _CHUNK]
        size = part.abs()
        number = _nearest(size, quadrant) if squares is None else squares.nearest(size)
        negative = (part < 0).to(torch.uint8)
        out[first : first + _CHUNK] = number.to(torch.uint8) | negative[:, 0] << 6 | negative[:, 1] << 7
    return out.view(points.shape[:-1])


def _nearest(size: Tensor, quadrant: Tensor) -> Tensor:
    """int64 ``[P]``: the numbers of the points nearest to coordinates ``[P, 2]``, 0 and more."""
    return _scores(size, torch.stack((*quadrant.t(), -quadrant.square().sum(1) / 2))).argmax(1)


def _scores(size: Tensor, terms: Tensor) -> Tensor:
    """``[P, C]``, the largest of which is that of the nearest point: ``<size, point> - |point|^2 / 2``.

    Args:
        size: ``[P, 2]``.
        terms: ``[3, C]`` or ``[3, P, C]``: coordinates of points, and the last term.
    """
    # No matrix product: its precision may be set low.
    return torch.addcmul(torch.addcmul(terms[2], size[:, :1], terms[0]), size[:, 1:], terms[1])


class Squares:
    """Squares of the plane, with the points that may be the nearest one somewhere in each: a few of all.

    Args:
        quadrant: points with positive coordinates, ``[64, 2]``.
    """

    def __init__(self, quadrant: Tensor) -> None:
        self._quadrant = quadrant
        self._reach = 1.25 * float(quadrant.max())
        width = self._reach / _SQUARES
        middles = (torch.arange(_SQUARES, device=quadrant.device, dtype=torch.float64) + 0.5) * width
        far = torch.cdist(torch.cartesian_prod(middles, middles), quadrant.double())
        # From the middle, a point that is nearest to another place of the square is at most a diagonal farther than
        # the one that is nearest to the middle.
        may = far <= far.amin(1, keepdim=True) + 1.0001 * 2**0.5 * width
        self._points = may.int().argsort(dim=1, descending=True, stable=True)[:, : int(may.sum(1).max())]
        terms = torch.stack((*quadrant.t(), -quadrant.square().sum(1) / 2))
        self._terms = terms[:, self._points].transpose(0, 1).flatten(1).contiguous()

    def nearest(self, size: Tensor) -> Tensor:
        """As `_nearest`, bitwise."""
        places = (size * (_SQUARES / self._reach)).to(torch.int32).clamp_(0, _SQUARES - 1)
        square = places[:, 0] * _SQUARES + places[:, 1]
        terms = self._terms.index_select(0, square).unflatten(1, (3, -1)).transpose(0, 1)
        best = _scores(size, terms).argmax(1, keepdim=True)
        found = self._points.index_select(0, square).gather(1, best)[:, 0]
        beyond = (~(size < self._reach).all(1)).nonzero().flatten()
        return found.index_copy_(0, beyond, _nearest(size[beyond], self._quadrant))


def best(wanted: Tensor, scale: Tensor, metric: Tensor, values: Tensor) -> Tensor:
    """The indices with the least error under a metric: of ``(wanted - scale c) metric (wanted - scale c)^T``, c a pair.

    Args:
        wanted: float32 ``[R, 2]``, or ``[E, R, 2]`` for experts, which are computed one after the other.
        scale: ``[..., R]``, the factor of values.
        metric: ``[..., R, 3]`` or ``[..., 1, 3]``: the upper left, the upper right and the lower right number of a
            symmetric matrix.
        values: ``[256, 2]``.

    Returns:
        int64 ``[..., R]``.
    """
    upper, mixed, lower = metric.unbind(-1)
    x, y = wanted.unbind(-1)
    half = -scale / 2
    terms = (upper * x + mixed * y, mixed * x + lower * y, half * upper, 2 * half * mixed, half * lower)
    c, d = values.unbind(1)
    numbers, forms = torch.stack(terms, -1), torch.stack((c, d, c * c, c * d, d * d))
    if numbers.dim() == 2:
        return (numbers @ forms).argmax(1)
    return torch.stack([(one @ forms).argmax(1) for one in numbers])


def toward(start: Tensor, points: Tensor, values: Tensor, share: float) -> Tensor:
    """Points moved toward the pairs of given indices, as far as lies in a share of these pairs' cells.

    Args:
        start: uint8 ``[...]``, indices.
        points: float32 ``[..., 2]``.
        values: ``[256, 2]``.
        share: of the way from the pair to its cell's border.

    Returns:
        ``[..., 2]``: between pair and point, and the point itself if that lies within.
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
