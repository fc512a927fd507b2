"""The choice of `qcut.plan`: a scheme for each group of layers, within a budget of loss or cost.

Errors of layers do not quite add up. Sums of sensitivities only propose choices; the loss of each is measured on the
model with the choice in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from qcut.conversion.planning.budget import Budget
from qcut.conversion.planning.knapsack import Selection, frontier, select
from qcut.conversion.planning.measure import Choice, Group, SearchSpace
from qcut.conversion.planning.plan import Point
from qcut.conversion.planning.sensitivity import as_loss, as_sum
from qcut.errors import PlanError
from qcut.layers.linear import Linear

_FINE = 10**6
"""Costs are whole millionths of their unit, rounded up: a sum never passes the limit."""
_POINTS = 64
"""Points of a curve, at most."""
_ROUNDS = 1
"""How often sensitivities are measured again around a choice."""


@dataclass(frozen=True)
class Assignment:
    """A scheme for each group.

    Attributes:
        choice: a scheme per group.
        measured: the loss of the choice, measured.
        start: the measured loss with every group on its cheapest scheme.
        limit: the cost allowed, or None.
        gap: no choice within the limit is predicted to lose less than the prediction minus this; None if unknown.
        uniform: one candidate for all groups, each measured.
    """

    choice: Choice
    measured: float
    start: float
    limit: float | None = None
    gap: float | None = None
    uniform: list[Point] = field(default_factory=list)


def within_loss(space: SearchSpace, budget: float) -> Assignment:
    """The cheapest choice found with a measured loss within a budget; see `qcut.plan`.

    Raises:
        PlanError: the loss is above the budget with every group on its most exact candidate.
    """
    return _Search(space, budget).run()


def within_cost(space: SearchSpace, budget: Budget) -> Assignment:
    """The choice of the least measured loss found within a limit of cost.

    1. The knapsack of the sensitivities.
    2. Around its choice every group is tried under every other scheme, all others as chosen, and the knapsack of the
       differences is solved; `_ROUNDS` times, or until the choice stays.
    3. Of all choices that were measured and cost no more than the limit, uniform ones among them, the one that loses
       least.

    Every group on its cheapest scheme has to be within the limit.
    """
    groups, limit = space.groups, budget.limit(space.weights)
    assert limit is not None
    unit = space.judge.metric if space.additive else "output error"
    schemes, costs, losses = _tables(groups, unit)
    most = math.floor(Fraction(limit) * _FINE)

    def named(options: Sequence[int]) -> Choice:
        return tuple(names[option] for names, option in zip(schemes, options, strict=True))

    first = select(costs, losses, most)
    assert first is not None, "the limit allows a choice"
    cheapest = named(frontier(costs, losses)[0].options)
    choice = named(first.options)
    tried = {choice: None}
    for number in range(_ROUNDS):
        again = select(costs, _around(space, choice, f"refine {number + 1}"), most)
        assert again is not None
        choice = named(again.options)
        if choice in tried:
            break
        tried[choice] = None
    uniform = space.uniform()
    every = list(dict.fromkeys([*tried, *uniform.values(), cheapest]))
    found = space.judge.losses([_layers(groups, c) for c in every], "measure plans")
    measured = dict(zip(every, found, strict=True))
    within = [c for c in (*tried, *uniform.values()) if sum(map(_fine, groups, c)) <= most]
    best = min(within, key=lambda c: (measured[c], _cost(groups, c)))
    gap = max(0.0, predicted(groups, best, unit) - as_loss(first.bound, unit)) if space.additive else None
    points = [Point(name, _cost(groups, same), measured[same]) for name, same in uniform.items()]
    return Assignment(best, measured[best], measured[cheapest], limit, gap, points)


def predicted(groups: Sequence[Group], choice: Choice, metric: str) -> float:
    """The loss that sensitivities add up to."""
    return as_loss(math.fsum(as_sum(g.sensitivity[s], metric) for g, s in zip(groups, choice, strict=True)), metric)


def curve(groups: Sequence[Group], metric: str) -> list[Point]:
    """Choices that are predicted to be best for their cost, by rising cost; 64 of them if there are more."""
    schemes, costs, losses = _tables(groups, metric)
    found = frontier(costs, losses)
    kept = [found[i * (len(found) - 1) // (_POINTS - 1)] for i in range(_POINTS)] if len(found) > _POINTS else found

    def point(one: Selection) -> Point:
        choice = [names[option] for names, option in zip(schemes, one.options, strict=True)]
        return Point("", _cost(groups, choice), as_loss(one.loss, metric))

    return [point(one) for one in kept]


def _layers(groups: Sequence[Group], choice: Sequence[str]) -> dict[str, Linear]:
    pairs = zip(groups, choice, strict=True)
    return {name: layer for group, scheme in pairs for name, layer in group.layers.get(scheme, {}).items()}


def _cost(groups: Sequence[Group], choice: Sequence[str]) -> float:
    return math.fsum(group.cost[scheme] for group, scheme in zip(groups, choice, strict=True))


def _tables(groups: Sequence[Group], metric: str) -> tuple[list[list[str]], list[list[int]], list[list[float]]]:
    """By group: its schemes, what they cost, and what they lose in the unit that adds up."""
    return (
        [list(group.cost) for group in groups],
        [[_fine(group, scheme) for scheme in group.cost] for group in groups],
        [[as_sum(group.sensitivity[scheme], metric) for scheme in group.cost] for group in groups],
    )


def _fine(group: Group, scheme: str) -> int:
    return math.ceil(Fraction(group.cost[scheme]) * _FINE)


def _around(space: SearchSpace, choice: Choice, what: str) -> list[list[float]]:
    """What each other scheme of one group adds to the loss of a choice, by group and scheme."""
    groups, metric = space.groups, space.judge.metric
    flips = [
        (*choice[:i], scheme, *choice[i + 1 :])
        for i, group in enumerate(groups)
        for scheme in group.cost
        if scheme != choice[i]
    ]
    losses = space.nearby([_layers(groups, c) for c in (choice, *flips)], what)
    here, *there = (as_sum(loss, metric) for loss in losses)
    base = here if math.isfinite(here) else 0.0
    rest = iter(there)
    return [[0.0 if scheme == choice[i] else next(rest) - base for scheme in g.cost] for i, g in enumerate(groups)]


class _Search:
    """Runs and undoes moves to dearer schemes within a budget of loss."""

    def __init__(self, space: SearchSpace, budget: float) -> None:
        self.space, self.groups, self.budget = space, space.groups, budget
        self.seen: dict[Choice, float] = {}

    def loss(self, choice: Choice) -> float:
        """The measured loss of the model with all layers of a choice in place."""
        if choice not in self.seen:
            variant = _layers(self.groups, choice)
            what = f"measure plan {len(self.seen) + 1}"
            self.seen[choice] = self.space.judge.losses([variant], what)[0] if variant else 0.0
        return self.seen[choice]

    def run(self) -> Assignment:
        path = self.path()
        start = self.loss(path[0])
        # The loss of path[above] is within the budget, that of path[below] is not.
        below, above = 0, len(path) - 1
        if start <= self.budget:
            above = 0
        elif self.loss(path[above]) > self.budget:
            raise PlanError(
                f"no plan meets the budget of {self.budget:.3%} ({self.space.judge.metric}): every layer on its most "
                f"exact candidate still loses {self.loss(path[above]):.3%}; allow more, or add candidates such as "
                "'fp16'"
            )
        while above - below > 1:
            middle = (above + below) // 2
            below, above = (below, middle) if self.loss(path[middle]) <= self.budget else (middle, above)
        choice = self.undo(path[above], path[0])
        return Assignment(choice, self.loss(choice), start)

    def path(self) -> list[Choice]:
        """From the cheapest choice to the most exact one, by sensitivity saved per cost added."""
        choice = [group.cheapest for group in self.groups]
        path = [tuple(choice)]
        while True:
            moves = [
                (saved / max(group.cost[scheme] - group.cost[choice[i]], 1e-12), i, scheme)
                for i, group in enumerate(self.groups)
                for scheme in group.cost
                if (saved := group.sensitivity[choice[i]] - group.sensitivity[scheme]) > 0
            ]
            if not moves:
                # Sensitivities can tie at 0: at the very end, the dearest of the tied is taken as the most exact.
                return [*path, tuple(group.most_exact for group in self.groups)]
            _, i, scheme = max(moves, key=lambda move: move[0])
            choice[i] = scheme
            path.append(tuple(choice))

    def undo(self, choice: Choice, start: Choice) -> Choice:
        """Try each moved layer on every cheaper scheme, the greatest savings first; keep what the budget allows."""
        trials = [
            (group.cost[scheme] - group.cost[choice[i]], i, scheme)
            for i, group in enumerate(self.groups)
            for scheme in group.cost
            if choice[i] != start[i] and group.cost[scheme] < group.cost[choice[i]]
        ]
        for _, i, scheme in sorted(trials):
            group, now = self.groups[i], choice[i]
            added = group.sensitivity[scheme] - group.sensitivity[now]
            hopeless = self.space.additive and added > 2 * (self.budget - self.loss(choice))
            if group.cost[scheme] < group.cost[now] and not hopeless:
                trial = (*choice[:i], scheme, *choice[i + 1 :])
                if self.loss(trial) <= self.budget:
                    choice = trial
        return choice
