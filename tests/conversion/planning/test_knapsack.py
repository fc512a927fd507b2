"""The knapsack against every choice there is, and what it promises where there are too many."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from qcut.conversion.planning.knapsack import frontier, least_cost, select


def instance(seed: int, groups: int, options: int = 4) -> tuple[list[list[int]], list[list[float]]]:
    """Groups of random costs and losses, some of them equal, dominated or infinite."""
    draw = random.Random(seed)
    costs = [[draw.randint(0, 30) for _ in range(draw.randint(1, options))] for _ in range(groups)]
    rare = (0.0, math.inf, 0.5)
    losses = [[draw.choice(rare) if draw.random() < 0.1 else draw.random() ** 4 for _ in group] for group in costs]
    return costs, losses


def best_of_all(costs: list[list[int]], losses: list[list[float]], limit: int) -> float | None:
    """The least loss of every choice within the limit; None if there is none."""
    found = None
    for options in itertools.product(*(range(len(group)) for group in costs)):
        if sum(group[o] for group, o in zip(costs, options, strict=True)) <= limit:
            loss = math.fsum(group[o] for group, o in zip(losses, options, strict=True))
            found = loss if found is None else min(found, loss)
    return found


def test_no_choice_is_better() -> None:
    for seed in range(150):
        costs, losses = instance(seed, 1 + seed % 6)
        limit = random.Random(seed).randint(0, 90)
        want, found = best_of_all(costs, losses, limit), select(costs, losses, limit)
        if want is None or found is None:
            assert want is found is None, seed
            assert least_cost(costs) > limit, seed
            continue
        assert found.loss == pytest.approx(want, rel=1e-12), seed
        assert found.gap == 0, seed
        assert found.cost == sum(group[o] for group, o in zip(costs, found.options, strict=True)) <= limit, seed
        assert found.loss == math.fsum(group[o] for group, o in zip(losses, found.options, strict=True)), seed


def test_with_few_states_the_bound_holds() -> None:
    """Losses may be negative, too: those of a move from a choice are."""
    for seed in range(40):
        costs, losses = instance(seed, 6)
        losses = [[loss - 0.3 if math.isfinite(loss) else 9.0 for loss in group] for group in losses]
        limit = least_cost(costs) + 15
        want, found = best_of_all(costs, losses, limit), select(costs, losses, limit, states=1)
        assert want is not None, seed
        assert found is not None, seed
        assert found.bound <= want + 1e-12, seed
        assert found.loss >= want - 1e-12, seed
        assert found.cost <= limit, seed


def test_a_whole_model_is_solved_exactly_and_alike() -> None:
    draw = random.Random(0)
    sizes = [draw.choice((1024, 4096, 14336)) * draw.choice((1024, 4096)) for _ in range(96)]
    costs = [[size * bits for bits in (17, 25, 33, 66, 64)] for size in sizes]
    losses = [
        [draw.lognormvariate(0, 1.5) * size * error for error in (1e-1, 3e-2, 9e-3, 1e-4, 5e-5)] for size in sizes
    ]
    for eighths in (20, 28, 36):
        limit = sum(sizes) * eighths
        found = select(costs, losses, limit)
        assert found is not None
        assert found.gap == 0
        assert 0.999 * limit < found.cost <= limit
        assert select(costs, losses, limit) == found


def test_the_frontier_is_the_best_for_each_cost() -> None:
    costs, losses = instance(3, 6)
    losses = [[min(loss, 2.0) for loss in group] for group in losses]
    points = frontier(costs, losses)
    assert points[0].cost == least_cost(costs)
    assert points[-1].loss == pytest.approx(sum(map(min, losses)))
    slopes = []
    for a, b in itertools.pairwise(points):
        assert a.cost < b.cost
        assert a.loss > b.loss
        slopes.append((b.loss - a.loss) / (b.cost - a.cost))
    assert slopes == pytest.approx(sorted(slopes))
    for point in points:
        assert point.loss == pytest.approx(best_of_all(costs, losses, point.cost))


def test_a_broken_option_is_the_last_resort() -> None:
    costs, losses = [[1, 5], [1, 5]], [[math.inf, 0.1], [math.inf, 0.2]]
    assert select(costs, losses, 10).options == (1, 1)  # type: ignore[union-attr]
    found = select(costs, losses, 6)
    assert found is not None
    assert found.loss == math.inf
    assert found.cost == 6
