"""The search of `qcut.plan`: a scheme for each layer, so that the measured loss stays within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qcut.errors import PlanError
from qcut.layers.linear import Linear

Choice = tuple[str, ...]
"""A scheme per group."""


@dataclass
class TiedLayers:
    """Layers that share one weight and hence one scheme; nearly always one layer.

    Attributes:
        names: the layers.
        layers: per scheme, the quantized layers; nothing for ``fp16``.
        cost: per scheme.
        sensitivity: per scheme, the loss with these layers alone quantized.
    """

    names: list[str]
    layers: dict[str, dict[str, Linear]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)

    @property
    def cheapest(self) -> str:
        """The scheme of the least cost; of several, the one that loses least."""
        return min(self.cost, key=lambda scheme: (self.cost[scheme], self.sensitivity[scheme]))

    @property
    def most_exact(self) -> str:
        """The scheme that loses least; of several, the dearest."""
        return min(self.cost, key=lambda scheme: (self.sensitivity[scheme], -self.cost[scheme]))

    def quantized(self) -> list[Linear]:
        """The layers of all schemes."""
        return [layer for layers in self.layers.values() for layer in layers.values()]


class Search:
    """Steps 3 and 4 of `qcut.plan`.

    Args:
        groups: groups of tied layers, with costs and sensitivities.
        loss: returns the loss of the model, given replaced layers by name and the number of the measurement.
        budget: the largest allowed loss.
        metric: the loss in words, for error messages.
        additive: whether sensitivities have the unit of the loss.
    """

    def __init__(
        self,
        groups: list[TiedLayers],
        loss: Callable[[dict[str, Linear], int], float],
        budget: float,
        metric: str,
        additive: bool,
    ) -> None:
        self.groups, self.measure, self.budget, self.metric, self.additive = groups, loss, budget, metric, additive
        self.seen: dict[Choice, float] = {}

    def loss(self, choice: Choice) -> float:
        """The measured loss of the model with all layers of a choice in place."""
        if choice not in self.seen:
            variant = {
                name: layer
                for group, scheme in zip(self.groups, choice, strict=True)
                for name, layer in group.layers.get(scheme, {}).items()
            }
            self.seen[choice] = self.measure(variant, len(self.seen) + 1) if variant else 0.0
        return self.seen[choice]

    def run(self) -> tuple[Choice, float, float]:
        """The choice, its measured loss, and the loss of the cheapest choice."""
        path = self.path()
        start = self.loss(path[0])
        # The loss of path[above] is within the budget, that of path[below] is not.
        below, above = 0, len(path) - 1
        if start <= self.budget:
            above = 0
        elif self.loss(path[above]) > self.budget:
            raise PlanError(
                f"no plan meets the budget of {self.budget:.3%} ({self.metric}): every layer on its most exact "
                f"candidate still loses {self.loss(path[above]):.3%}; allow more, or add candidates such as 'fp16'"
            )
        while above - below > 1:
            middle = (above + below) // 2
            below, above = (below, middle) if self.loss(path[middle]) <= self.budget else (middle, above)
        choice = self.undo(path[above], path[0])
        return choice, self.loss(choice), start

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
            hopeless = self.additive and added > 2 * (self.budget - self.loss(choice))
            if group.cost[scheme] < group.cost[now] and not hopeless:
                trial = (*choice[:i], scheme, *choice[i + 1 :])
                if self.loss(trial) <= self.budget:
                    choice = trial
        return choice
