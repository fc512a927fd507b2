"""The choice of `qcut.plan` under a limit of cost: what sensitivities say is best, then measured, and bettered.

Sensitivities are taken to add up, which makes the choice a knapsack (`qcut.conversion.planning.knapsack`). How far they
do is seen by measuring the model with the choice in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from qcut.conversion.planning.knapsack import Selection, frontier, select
from qcut.conversion.planning.plan import Point
from qcut.conversion.planning.search import Choice, TiedLayers
from qcut.conversion.planning.sensitivity import as_loss, as_sum
from qcut.layers.linear import Linear

_FINE = 10**6
"""Costs are whole millionths of their unit, rounded up: a sum never passes the limit."""

_POINTS = 64
"""Points of a curve, at most."""

Variant = dict[str, Linear]


@dataclass(frozen=True)
class Allocation:
    """What a limit of cost allows.

    Attributes:
        choice: a scheme per group.
        measured: the loss of the choice, measured.
        start: the measured loss with every group on its cheapest scheme.
        bound: no choice within the limit has sensitivities that add up to a loss below this.
        uniform: one candidate for all groups, each measured.
    """

    choice: Choice
    measured: float
    start: float
    bound: float
    uniform: list[Point]


def allocate(
    groups: Sequence[TiedLayers],
    limit: float,
    uniform: Mapping[str, Choice],
    losses: Callable[[list[Variant], str], list[float]],
    nearby: Callable[[list[Variant], str], list[float]],
    metric: str,
    unit: str,
    rounds: int,
) -> Allocation:
    """Choose a scheme for each group, so that the loss is least within a limit of cost.

    1. The knapsack of the sensitivities.
    2. Around its choice every group is tried under every other scheme, all others as chosen, and the knapsack of the
       differences is solved; ``rounds`` times, or until the choice stays.
    3. Of all choices that were measured and cost no more than the limit, uniform ones among them, the one that loses
       least.

    Args:
        groups: with costs and sensitivities under each scheme that a group can have.
        limit: the largest sum of costs.
        uniform: by candidate, the scheme that it means for each group.
        losses: the measured losses of the model with layers replaced, by name; a word for the progress bar.
        nearby: the same, on less text, for step 2.
        metric: the meaning of measured losses. Divergences, which ``perplexity`` is made of, add up.
        unit: the metric that sensitivities are in; ``output error`` for those that are no loss of the model.
        rounds: of step 2.

    Returns:
        The allocation. Every group on its cheapest scheme has to be within the limit.
    """
    schemes, costs, alone = _tables(groups, unit)
    most = math.floor(Fraction(limit) * _FINE)

    def named(options: Sequence[int]) -> Choice:
        return tuple(names[option] for names, option in zip(schemes, options, strict=True))

    def variant(choice: Choice) -> Variant:
        pairs = zip(groups, choice, strict=True)
        return {name: layer for group, scheme in pairs for name, layer in group.layers.get(scheme, {}).items()}

    def cost(choice: Choice) -> float:
        return math.fsum(group.cost[scheme] for group, scheme in zip(groups, choice, strict=True))

    first = select(costs, alone, most)
    assert first is not None, "the limit allows a choice"
    hull = frontier(costs, alone)
    tried = {named(first.options): None}
    choice = named(first.options)
    for number in range(rounds):
        again = select(costs, _around(groups, choice, variant, nearby, metric, f"refine {number + 1}"), most)
        assert again is not None
        choice = named(again.options)
        if choice in tried:
            break
        tried[choice] = None
    every = list(dict.fromkeys([*tried, *uniform.values(), named(hull[0].options)]))
    measured = dict(zip(every, losses([variant(c) for c in every], "measure plans"), strict=True))
    within = [c for c in (*tried, *uniform.values()) if sum(map(_fine, groups, c)) <= most]
    best = min(within, key=lambda c: (measured[c], cost(c)))
    return Allocation(
        best,
        measured[best],
        measured[named(hull[0].options)],
        as_loss(first.bound, unit),
        [Point(name, cost(same), measured[same]) for name, same in uniform.items()],
    )


def predicted(groups: Sequence[TiedLayers], choice: Choice, metric: str) -> float:
    """The loss that sensitivities add up to."""
    return as_loss(math.fsum(as_sum(g.sensitivity[s], metric) for g, s in zip(groups, choice, strict=True)), metric)


def curve(groups: Sequence[TiedLayers], metric: str) -> list[Point]:
    """Choices that are predicted to be best for their cost, by rising cost; 64 of them where there are more."""
    schemes, costs, alone = _tables(groups, metric)
    found = frontier(costs, alone)
    kept = [found[i * (len(found) - 1) // (_POINTS - 1)] for i in range(_POINTS)] if len(found) > _POINTS else found

    def point(one: Selection) -> Point:
        choice = [names[option] for names, option in zip(schemes, one.options, strict=True)]
        cost = math.fsum(group.cost[scheme] for group, scheme in zip(groups, choice, strict=True))
        return Point("", cost, as_loss(one.loss, metric))

    return [point(one) for one in kept]


def _tables(groups: Sequence[TiedLayers], metric: str) -> tuple[list[list[str]], list[list[int]], list[list[float]]]:
    """By group: its schemes, what they cost, and what they lose in the unit that adds up."""
    return (
        [list(group.cost) for group in groups],
        [[_fine(group, scheme) for scheme in group.cost] for group in groups],
        [[as_sum(group.sensitivity[scheme], metric) for scheme in group.cost] for group in groups],
    )


def _fine(group: TiedLayers, scheme: str) -> int:
    return math.ceil(Fraction(group.cost[scheme]) * _FINE)


def _around(
    groups: Sequence[TiedLayers],
    choice: Choice,
    variant: Callable[[Choice], Variant],
    nearby: Callable[[list[Variant], str], list[float]],
    metric: str,
    what: str,
) -> list[list[float]]:
    """What each other scheme of one group adds to the loss of a choice, by group and scheme."""
    flips = [
        (*choice[:i], scheme, *choice[i + 1 :])
        for i, group in enumerate(groups)
        for scheme in group.cost
        if scheme != choice[i]
    ]
    here, *there = (as_sum(loss, metric) for loss in nearby([variant(c) for c in (choice, *flips)], what))
    rest = iter(there)
    if not math.isfinite(here):
        return [[0.0 if scheme == choice[i] else next(rest) for scheme in group.cost] for i, group in enumerate(groups)]
    return [
        [0.0 if scheme == choice[i] else next(rest) - here for scheme in group.cost] for i, group in enumerate(groups)
    ]
