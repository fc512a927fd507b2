"""One option for each group, so that losses add up to the least within a limit of cost: the multiple-choice knapsack.

Lagrange's multiplier gives the options of the lower convex hull, of each group and of all: points that no choice of
their cost betters, and a bound for what lies between. Dynamic programming over the groups then keeps choices that no
other choice equals at less cost, and drops those that the bound shows to be worse than one that is known. Where more
remain than memory should hold, those with the worst bounds are dropped, and the result bounds its distance from the
least.

Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems" (2004), chapter 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_STATES = 1 << 17
"""Choices that are kept at once, by default."""

Costs = Sequence[Sequence[int]]
Losses = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Selection:
    """A choice of one option for each group.

    Attributes:
        options: index of the option, by group.
        cost: sum of the costs.
        loss: sum of the losses.
        bound: no choice within the limit loses less than this.
    """

    options: tuple[int, ...]
    cost: int
    loss: float
    bound: float

    @property
    def gap(self) -> float:
        """How much more this choice may lose than the best; 0 if it is proven best, except for rounding of sums."""
        return max(0.0, self.loss - self.bound)


class _Option(NamedTuple):
    cost: int
    loss: float
    place: int


class _Step(NamedTuple):
    """From one point of a group's hull to the next."""

    slope: float
    group: int
    to: _Option
    cost: int
    saved: float


def least_cost(costs: Costs) -> int:
    """The cost of every group on its cheapest option."""
    return sum(map(min, costs))


def select(costs: Costs, losses: Losses, limit: int, *, states: int = _STATES) -> Selection | None:
    """The choice that loses least within a limit.

    Args:
        costs: by group and option, from 0 up.
        losses: by group and option; an infinite one is taken only if all options that fit have it.
        limit: the largest sum of costs.
        states: choices that are kept at once.

    Returns:
        The choice, or None if even the cheapest costs more than the limit.

    Exactness: the least sum of losses, as float64 adds them, unless more choices than ``states`` had to be kept; see
    `Selection.gap`. Deterministic: of equal losses the one of less cost, then the one found first.
    """
    if least_cost(costs) > limit:
        return None
    finite = _finite(losses)
    groups = [_undominated(group, finite[i]) for i, group in enumerate(costs)]
    # Great differences first: what is left then bounds the rest closely.
    order = sorted(range(len(groups)), key=lambda i: (groups[i][-1].loss - groups[i][0].loss, i))
    bounds = _Bounds([groups[i] for i in order])
    best = _rounded(groups, limit)
    least = math.fsum(o.loss for o in best)
    cost, loss = np.zeros(1, np.int64), np.zeros(1, np.float64)
    trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    dropped = math.inf
    for stage, group in enumerate(order):
        options = groups[group]
        more = np.add.outer(np.array([o.cost for o in options], np.int64), cost)
        worse = np.add.outer(np.array([o.loss for o in options], np.float64), loss)
        option, parent = (index.ravel() for index in np.indices(more.shape))
        more, worse = more.ravel(), worse.ravel()
        bound = bounds.at(stage + 1, worse, limit - more)
        kept = np.flatnonzero(bound < least)
        kept = kept[np.lexsort((worse[kept], more[kept]))]
        lowest = np.minimum.accumulate(np.concatenate(([math.inf], worse[kept])))[:-1]
        kept = kept[worse[kept] < lowest]
        if len(kept) > states:
            by_bound = np.argsort(bound[kept], kind="stable")
            dropped = min(dropped, float(bound[kept[by_bound[states]]]))
            kept = kept[np.sort(by_bound[:states])]
        cost, loss = more[kept], worse[kept]
        trail.append((option[kept], parent[kept]))
        if not len(kept):
            break
    chosen = [o.place for o in best]
    if len(trail) == len(order) and len(cost):
        at = int(loss.argmin())
        for group, (option, parent) in zip(reversed(order), reversed(trail), strict=True):
            chosen[group] = groups[group][int(option[at])].place
            at = int(parent[at])
    return _selection(chosen, costs, losses, dropped)


def frontier(costs: Costs, losses: Losses) -> list[Selection]:
    """Choices that are best for their own cost: the lower convex hull, from the cheapest to that of the least loss.

    Losses fall from one to the next, costs rise, and less is saved for each unit of cost. A choice with an infinite
    loss is at the beginning, if anywhere.
    """
    finite = _finite(losses)
    groups = [_undominated(group, finite[i]) for i, group in enumerate(costs)]
    chosen = [group[0] for group in groups]
    found = [tuple(o.place for o in chosen)]
    for step in _all_steps(groups):
        chosen[step.group] = step.to
        found.append(tuple(o.place for o in chosen))
    return [_selection(options, costs, losses) for options in found]


def _selection(options: Sequence[int], costs: Costs, losses: Losses, bound: float = math.inf) -> Selection:
    loss = math.fsum(group[o] for group, o in zip(losses, options, strict=True))
    cost = sum(group[o] for group, o in zip(costs, options, strict=True))
    return Selection(tuple(options), cost, loss, min(loss, bound))


def _finite(losses: Losses) -> list[list[float]]:
    """Losses with a large number for infinity: one costs more than all finite ones together."""
    large = 1e3 * (1 + math.fsum(abs(loss) for group in losses for loss in group if math.isfinite(loss)))
    return [[loss if math.isfinite(loss) else large for loss in group] for group in losses]


def _undominated(costs: Sequence[int], losses: Sequence[float]) -> list[_Option]:
    """A group's options by rising cost and falling loss, without those that another one betters."""
    found: list[_Option] = []
    for option in sorted(_Option(c, loss, i) for i, (c, loss) in enumerate(zip(costs, losses, strict=True))):
        if not found or option.loss < found[-1].loss:
            found.append(option)
    return found


def _steps(group: int, options: Sequence[_Option]) -> list[_Step]:
    """The lower convex hull of a group's options, as steps of rising slope (loss per cost, negative)."""
    hull: list[_Option] = []
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return [_Step(_slope(a, b), group, b, b.cost - a.cost, a.loss - b.loss) for a, b in pairwise(hull)]


def _all_steps(groups: Sequence[Sequence[_Option]]) -> list[_Step]:
    """The steps of all groups, those that save most for their cost first; a group's own stay in order."""
    return sorted((s for i, group in enumerate(groups) for s in _steps(i, group)), key=lambda s: (s.slope, s.group))


def _slope(a: _Option, b: _Option) -> float:
    return (b.loss - a.loss) / (b.cost - a.cost)


def _rounded(groups: Sequence[Sequence[_Option]], limit: int) -> list[_Option]:
    """A choice to begin with: the hull's steps that fit, steepest first, then every other option that still fits."""
    chosen = [group[0] for group in groups]
    left = limit - sum(o.cost for o in chosen)
    blocked: set[int] = set()
    for step in _all_steps(groups):
        if step.group in blocked or step.cost > left:
            blocked.add(step.group)
            continue
        chosen[step.group], left = step.to, left - step.cost
    while True:
        moves = [
            (option.loss - now.loss, i, option)
            for i, (now, group) in enumerate(zip(chosen, groups, strict=True))
            for option in group
            if option.loss < now.loss and option.cost - now.cost <= left
        ]
        if not moves:
            return chosen
        _, i, option = min(moves)
        left -= option.cost - chosen[i].cost
        chosen[i] = option


class _Bounds:
    """The least loss that the groups from one on can have, were options divisible, as a function of the cost left."""

    def __init__(self, groups: Sequence[Sequence[_Option]]) -> None:
        self._curves: list[tuple[int, NDArray[np.float64], NDArray[np.float64]]] = []
        for first in range(len(groups) + 1):
            rest = groups[first:]
            steps = _all_steps(rest)
            least = math.fsum(group[-1].loss for group in rest)
            saved = np.array([s.saved for s in reversed(steps)])
            losses = least + np.concatenate(([0.0], np.cumsum(saved)))[::-1]
            costs = np.concatenate(([0.0], np.cumsum([float(s.cost) for s in steps])))
            self._curves.append((sum(group[0].cost for group in rest), costs, losses))

    def at(self, first: int, loss: NDArray[np.float64], left: NDArray[np.int64]) -> NDArray[np.float64]:
        """The least total of choices that have lost so much already, and may cost so much more; infinite if none."""
        base, costs, losses = self._curves[first]
        extra = (left - base).astype(np.float64)
        rest = np.interp(extra, costs, losses)
        # A hair less than the sum, which is not exact.
        return np.where(extra < 0, math.inf, loss + rest - 1e-12 * (np.abs(loss) + np.abs(rest)))
