"""Makes the codebook of pairs: 256 points of the plane that represent two independent normal values.

``python -m qcut.numerics.codebook.fitting.lloyd_pairs`` prints the table that `qcut.numerics.codebook.pairs` holds. The
codebook is the same under changes of either sign, so that 64 points with positive coordinates are all there is to find.
Lloyd's method I ends in one of many fixed points; noise that fades before the last steps leads to a good one, and its
seed was chosen among a hundred. To which one a seed leads depends on the last bits of sums, so that another processor
may print another table, of nearly the same error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

POINTS = 64
"""Points of a quadrant."""
DIGITS = 4
"""Decimal places of the table."""
SEED = 8

_TOP = 7.0  # the normal distribution has 3e-12 beyond
_LINES = 256  # of constant y, on which cells are intervals
_FEW_LINES = 64  # while there is noise
_NEIGHBOURS = 24  # more than border a cell
_NOISY_STEPS, _STEPS = 1000, 4000
_NOISE = 0.07
_RELAXATION = 1.7  # Lloyd's steps are too short by about this factor
_TOLERANCE = 1e-7


def solve(seed: int = SEED) -> tuple[Tensor, float]:
    """A fixed point of Lloyd's method.

    Args:
        seed: of the start and of the noise.

    Returns:
        The points, float64 ``[64, 2]``, in ascending order of the first coordinate, and the mean squared error of one
        of the two values.

    Exactness: see `settled`; which fixed point it is depends on the processor.

    Source: Lloyd, "Least squares quantization in PCM" (1957/1982), method I; Linde, Buzo, Gray, "An algorithm for
    vector quantizer design" (1980).
    """
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(POINTS, 2, generator=generator, dtype=torch.float64, device="cpu")

    points = (1.35 * noise()).abs()
    for i in range(_NOISY_STEPS):
        shift = float(torch.rand((), generator=generator, dtype=torch.float64, device="cpu"))
        means, _ = centroids(points, _FEW_LINES, shift)
        means = torch.where(means.isfinite(), means, noise().abs())  # a cell without area starts anew
        size = _NOISE * max(0.0, 1 - i / (0.7 * _NOISY_STEPS)) * (0.5 + means.norm(dim=1, keepdim=True) / 4)
        points = (points + 1.3 * (means - points) + size * noise()).abs().clamp_min(1e-3)
    return settled(points)


def settled(points: Tensor) -> tuple[Tensor, float]:
    """The fixed point of Lloyd's method that lies nearest downhill.

    Args:
        points: float64 ``[64, 2]``, positive, no two with one x.

    Returns:
        As `solve`.

    Exactness: points are means of their cells to within ``1e-6``; means are integrals along x, exact, summed over 256
    values of y.
    """
    for _ in range(_STEPS):
        means, _ = centroids(points)
        moved = means - points
        points = points + _RELAXATION * moved
        if float(moved.abs().max()) < _TOLERANCE:
            break
    points = points[points[:, 0].argsort()]
    return points, centroids(points)[1]


def centroids(points: Tensor, lines: int = _LINES, shift: float = 0.5) -> tuple[Tensor, float]:
    """A step of Lloyd's method.

    Args:
        points: float64 ``[P, 2]``, positive, no two with one x: the quadrant's part of a codebook.
        lines: values of y, evenly spaced.
        shift: of the first from 0, in spaces. Points come to fit the lines where these are few and always the same.

    Returns:
        The mean of each point's cell under the normal distribution, ``[P, 2]``, and the mean squared error of one of
        the two values.
    """
    y = (torch.arange(lines, dtype=torch.float64, device="cpu") + shift) * (_TOP / lines)
    weight = _density(y)
    weight /= weight.sum()
    near = (points[None] - points[:, None]).square().sum(2).topk(_NEIGHBOURS + 1, largest=False).indices[:, 1:]
    # On a line, the border to a neighbour's cell lies at x = offset + slope * y.
    away = points[near] - points[:, None]
    twice = 2 * away[..., 0]
    squares = points.square().sum(1)
    offset = (squares[near] - squares[:, None]) / twice
    slope = -2 * away[..., 1] / twice

    def border(side: Tensor, none: float) -> Tensor:
        start, rise = torch.where(side, offset, none), torch.where(side, slope, 0.0)
        return start[..., None] + rise[..., None] * y

    high = border(twice > 0, math.inf).amin(1)
    low = border(twice < 0, -math.inf).amax(1).clamp_min(0)
    inside = high > low
    mass = torch.where(inside, torch.erf(high / math.sqrt(2)) - torch.erf(low / math.sqrt(2)), 0.0) * weight
    first = torch.where(inside, _density(low) - _density(high), 0.0) * weight
    ends = low * _density(low) - torch.where(high.isinf(), 0.0, high * _density(high))
    second = mass + torch.where(inside, ends, 0.0) * weight
    total, x_mean, y_mean = mass.sum(1), first.sum(1), (mass * y).sum(1)
    around = second.sum(1) + (mass * y.square()).sum(1) - 2 * (points[:, 0] * x_mean + points[:, 1] * y_mean)
    error = float((around + squares * total).sum()) / 2
    return torch.stack((x_mean / total, y_mean / total), 1), error


def _density(x: Tensor) -> Tensor:
    """Twice that of the normal distribution: all of it lies above 0."""
    return torch.exp(-x.square() / 2) * math.sqrt(2 / math.pi)


def table(points: Tensor) -> list[tuple[float, float]]:
    """Points as they are stored, rounded to `DIGITS` places."""
    return [(round(x, DIGITS), round(y, DIGITS)) for x, y in points.tolist()]


if __name__ == "__main__":
    found, error = solve()
    print(f"squared error {error:.6f}")
    for row in range(0, POINTS, 4):
        print("    " + ", ".join(f"({x:.{DIGITS}f}, {y:.{DIGITS}f})" for x, y in table(found)[row : row + 4]) + ",")
