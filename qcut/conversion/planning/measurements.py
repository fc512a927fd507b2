"""A model's layers under all candidates, measured once: plans within any limit come from one survey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from qcut.conversion.calibration.calibrate import Calibration, calibrate
from qcut.conversion.calibration.fused_projections import siblings
from qcut.conversion.calibration.second_order import channel_weights
from qcut.conversion.planning.assignment import Variant, allocate, curve, predicted
from qcut.conversion.planning.budget import Goal
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.conversion.planning.search import Choice, Search, TiedLayers
from qcut.conversion.planning.search_space import Candidates, Passes
from qcut.conversion.planning.sensitivity import Judge
from qcut.errors import CalibrationError, PlanError
from qcut.models.modules import check_batches, tied_elsewhere, weight_nk
from qcut.models.selection import find_layers, globs
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.schemes import Scheme

Measure = Literal["model", "gradient", "layer"]

_ROUNDS = 1
"""How often sensitivities are measured again around a choice."""


class Survey:
    """A float model whose layers are quantized under every candidate, and how much each of them loses.

    Args:
        model: not changed.
        batches: what the model is called on.
        schemes: the candidates.
        calibration: of the model; None: made of the batches, where it is needed.
        second_moments: of the layers' inputs, to fit codebooks to; or None.
        measure: see `qcut.plan`.
        together: give layers that the engine can compute by one product one scheme.
        sensitivity_batches: how many of the batches sensitivities are measured on; None: all.
        include: globs of layers to take; None takes every linear layer.
        skip: globs of layers to leave.
        progress: show progress bars.
        passes: codebooks that are made already, by the scheme's name and the layer's; the others are made here.

    Raises:
        PlanError, CalibrationError, QuantizationError: see `qcut.plan`.
        ConfigError, ShapeError: passes of another scheme, or see `qcut.layers.codebook.CodebookLinear.from_passes`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        schemes: Sequence[Scheme],
        *,
        calibration: Calibration | None,
        second_moments: Mapping[str, Tensor | Curvature] | None,
        measure: Measure,
        together: bool,
        sensitivity_batches: int | None,
        include: Sequence[str] | None,
        skip: Sequence[str],
        progress: bool,
        passes: Passes | None = None,
    ) -> None:
        include, skip = None if include is None else globs(include, "include"), globs(skip, "skip")
        check_batches(batches)
        self._model, self._batches, self._progress = model, list(batches), progress
        if not self._batches:
            raise CalibrationError("batches: found none; a plan needs at least one batch")
        self._modules = _layers_to_plan(model, include, skip)
        self._measure, self._few = measure, sensitivity_batches
        self._additive = measure != "layer"
        self._fitted = second_moments is not None
        self._sets = siblings(model, self._batches, self._modules)
        if calibration is None and (measure != "model" or any(scheme.needs_range for scheme in schemes)):
            calibration = calibrate(model, self._batches, layers=list(self._modules), skip=skip, progress=progress)
        sets = self._sets if together else []
        self._candidates = Candidates(self._modules, schemes, sets, calibration, second_moments, passes or {})
        self._judge = Judge(model, self._batches, progress)

    @property
    def weights(self) -> int:
        """N times K of all layers together."""
        return sum(weight_nk(module).numel() for module in self._modules.values())

    def check(self, goal: Goal) -> None:
        """Raise `PlanError` where every layer on its cheapest candidate costs more than the goal allows."""
        self._candidates.price(goal.cost)
        limit, least = goal.limit(self.weights), sum(min(group.cost.values()) for group in self._candidates.groups)
        if limit is not None and least > limit:
            raise goal.impossible(least, self.weights)

    @property
    def groups(self) -> list[TiedLayers]:
        """Groups of layers that get one scheme each; with their quantized layers after `quantize`."""
        return self._candidates.groups

    def quantize(self) -> None:
        """Quantize the layers under all candidates."""
        self._candidates.quantize(self._progress)

    def measure(self) -> None:
        """Measure sensitivities, after `quantize`."""
        work, judge = self._candidates, self._judge
        if self._measure == "model":
            work.measure(judge, self._few)
        elif self._measure == "layer":
            work.measure_outputs()
        else:
            batches = self._batches[: self._few]
            weights = channel_weights(self._model, batches, self._modules, judge.metric, progress=self._progress)
            work.estimate(weights, judge.metric)

    def plan(self, goal: Goal) -> Plan:
        """The plan for a goal, after `measure`.

        Raises:
            PlanError: no combination of the candidates meets the goal.
        """
        self.check(goal)
        groups, metric = self._candidates.groups, self._judge.metric
        choice, measured, start, found = self._within_cost(goal) if goal.loss is None else self._within_loss(goal.loss)
        unit = metric if self._additive else "its output error"
        reasons = [_reason(group, scheme, unit) for group, scheme in zip(groups, choice, strict=True)]
        layers = {
            name: self._entry(name, group, scheme, reason)
            for group, scheme, reason in zip(groups, choice, reasons, strict=True)
            for name in group.names
        }
        if self._additive:
            found |= {"curve": curve(groups, metric)}
        return Plan(
            {name: layers[name] for name in self._modules},
            goal.loss,
            metric,
            goal.objective,
            predicted(groups, choice, metric) if self._additive else None,
            measured,
            start,
            self._judge.tokens,
            siblings=[list(names) for names in self._sets],
            fitted=self._fitted,
            **found,
        )

    def _entry(self, name: str, group: TiedLayers, scheme: str, reason: str) -> LayerPlan:
        n, k = weight_nk(self._modules[name]).shape
        static_range, method = self._candidates.ranges.get(name, (None, ""))
        costs = self._candidates.costs[name]
        return LayerPlan(scheme, k, n, static_range, method, dict(group.sensitivity), dict(costs), reason)

    def _within_loss(self, budget: float) -> tuple[Choice, float, float, dict[str, Any]]:
        def loss(variant: Variant, number: int) -> float:
            return self._judge.losses([variant], f"measure plan {number}")[0]

        search = Search(self._candidates.groups, loss, budget, self._judge.metric, additive=self._additive)
        return *search.run(), {}

    def _within_cost(self, goal: Goal) -> tuple[Choice, float, float, dict[str, Any]]:
        def nearby(variants: list[Variant], what: str) -> list[float]:
            return self._judge.losses(variants, what, self._few)

        work, judge, limit = self._candidates, self._judge, goal.limit(self.weights)
        unit = judge.metric if self._additive else "output error"
        assert limit is not None
        found = allocate(work.groups, limit, work.uniform(), judge.losses, nearby, judge.metric, unit, _ROUNDS)
        gap = max(0.0, predicted(work.groups, found.choice, unit) - found.bound) if self._additive else None
        return found.choice, found.measured, found.start, {"limit": limit, "gap": gap, "uniform": found.uniform}


def _layers_to_plan(model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]) -> dict[str, nn.Module]:
    modules = find_layers(model, include, skip)
    for name in tied_elsewhere(model, modules):
        del modules[name]
    if not modules:
        raise PlanError(f"{type(model).__name__}: no layer to plan for: every weight is tied to something else")
    return modules


def _reason(group: TiedLayers, scheme: str, metric: str) -> str:
    """Why a group is not on its cheapest scheme; empty where it is."""
    cheapest = group.cheapest
    if scheme == cheapest:
        return ""
    alone, chosen = group.sensitivity[cheapest], group.sensitivity[scheme]
    return f"{metric} +{alone:.3%} with {cheapest} alone, +{chosen:.3%} with {scheme}"
