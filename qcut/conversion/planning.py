"""`plan`: find out which layers tolerate which scheme, and spend a quality budget where it saves most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from tqdm import tqdm

from qcut.config import Codebook, Scheme, StaticRange, parse_scheme
from qcut.conversion.calibration import Calibration, calibrate
from qcut.conversion.costs import CostModel, LayerSize, TimeCost, memory_cost
from qcut.conversion.plan import LayerPlan, Plan
from qcut.conversion.sensitivity import Judge, best_range, output_error
from qcut.errors import CalibrationError, ConfigError, PlanError
from qcut.layers.base import Linear
from qcut.models.modules import DEFAULT_SKIP, find_layers, tensor_key, tied_elsewhere, weight_nk, weight_of

__all__ = ["Plan", "plan"]

CANDIDATES = ("w8a8_static", "w8a8", "w8a16", "fp16")


@dataclass
class _Unit:
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


_Choice = tuple[str, ...]
"""A scheme per unit."""


def plan(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: float = 0.003,
    objective: Literal["time", "memory"] = "time",
    candidates: Sequence[str | Scheme] = CANDIDATES,
    calibration: Calibration | None = None,
    measure: Literal["model", "layer"] = "model",
    cost: CostModel | None = None,
    sensitivity_batches: int | None = 1,
    include: Sequence[str] | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    progress: bool = True,
) -> Plan:
    """Choose a scheme per layer so that the model's loss stays within a budget at the least cost.

    1. Every layer is quantized under every candidate; static ranges are the calibrated range (minmax, quantile or
       mse) that disturbs the layer's output least.
    2. Sensitivity: with ``measure="model"`` the model's loss with that layer alone quantized; with ``"layer"`` the
       relative squared error of the layer's own output on calibration tokens, for models where a forward call per
       layer and scheme is too much.
    3. All layers start on their cheapest scheme. Moves to dearer ones are ordered by sensitivity saved per cost added.
       The shortest run of moves whose loss, measured on the model with all of them made, is within the budget is found
       by bisection: errors of layers do not add up, so sums of sensitivities decide the order and nothing else.
    4. Every move is then tried back, those that save most first, and stays undone where the measured loss allows it.
       (Not tried: moves whose own sensitivity is more than twice what is left of the budget.)

    The loss is the relative increase of perplexity for language models, and the relative squared error of the output
    for others; see `qcut.conversion.sensitivity.Judge`. To use smoothing, call `qcut.smooth(model, calibration)` first
    and pass the same calibration: the plan then belongs to the smoothed model.

    Args:
        model: the float model; it is not changed. Beside it, quantized copies of its layers exist during the search:
            one in int8, and one for each codebook among the candidates.
        batches: what the model is called on (see `qcut.calibrate`), held in a list: a few windows do. Not the text
            you will evaluate on.
        budget: the loss allowed: 0.003 is 0.3 % of perplexity.
        objective: minimize ``time`` or ``memory`` (`qcut.conversion.costs`).
        candidates: schemes that may be used: names or objects, codebooks too.
        calibration: of this model as it is now; by default the batches are used for it.
        measure: see above.
        cost: a cost model of your own, instead of the objective's.
        sensitivity_batches: how many of the batches step 2 uses (None: all); steps 3 and 4 use all of them.
        include: globs of layers to plan for; None takes every linear layer.
        skip: globs of layers to leave as they are.
        progress: show progress bars.

    Returns:
        The `Plan`, static ranges included: `qcut.quantize(model, plan)` needs nothing else.

    Raises:
        PlanError: no combination of the candidates meets the budget; the least loss found is named.
        ConfigError: an unknown scheme, objective or measure, no candidate, or a negative budget.
        CalibrationError: no batch, or a layer without calibration.
        QuantizationError: no layer, or a weight that cannot be quantized.

    Exactness: deterministic for a deterministic model. The measured loss is exact for these batches; how far it
    carries to other text depends on how many tokens and how alike they are.
    """
    schemes = _check(budget, objective, candidates, measure)
    if sensitivity_batches is not None and sensitivity_batches < 1:
        raise ConfigError(f"sensitivity_batches: found {sensitivity_batches}; at least 1 is allowed, or None for all")
    batches = list(batches)
    if not batches:
        raise CalibrationError("batches: found none; a plan needs at least one batch")
    modules = find_layers(model, include, skip)
    for name in tied_elsewhere(model, modules):
        del modules[name]
    if not modules:
        raise PlanError(f"{type(model).__name__}: no layer to plan for: every weight is tied to something else")
    if calibration is None:
        calibration = calibrate(model, batches, layers=list(modules), skip=skip, progress=progress)
    if cost is None:
        cost = TimeCost() if objective == "time" else memory_cost

    judge = Judge(model, batches, progress)
    units = _units(modules)
    ranges: dict[str, tuple[StaticRange, str]] = {}
    for unit in tqdm(units, desc="quantize candidates", unit="layer", disable=not progress, leave=False):
        _prepare(unit, modules, schemes, calibration, cost, ranges)
    if measure == "model":
        pairs = [(unit, scheme) for unit in units for scheme in unit.layers]
        losses = judge.losses([unit.layers[scheme] for unit, scheme in pairs], "sensitivity", sensitivity_batches)
        for (unit, scheme), loss in zip(pairs, losses, strict=True):
            unit.sensitivity[scheme] = loss

    search = _Search(units, judge, budget, additive=measure == "model")
    choice, measured, start = search.run()
    layers = {}
    for unit, scheme in zip(units, choice, strict=True):
        for name in unit.names:
            n, k = weight_nk(modules[name]).shape
            static_range, method = ranges.get(name, (None, ""))
            layers[name] = LayerPlan(
                scheme,
                k,
                n,
                static_range,
                method,
                unit.sensitivity,
                unit.cost,
                _reason(unit, scheme, judge.metric, measure),
            )
    ordered = {name: layers[name] for name in modules}
    predicted = sum(unit.sensitivity[s] for unit, s in zip(units, choice, strict=True)) if measure == "model" else None
    kind = objective if cost is memory_cost or isinstance(cost, TimeCost) else "custom"
    return Plan(ordered, budget, judge.metric, kind, predicted, measured, start, judge.tokens)


def _check(budget: float, objective: str, candidates: Sequence[str | Scheme], measure: str) -> list[str]:
    if not budget >= 0 or not math.isfinite(budget):
        raise ConfigError(f"budget: found {budget}; a finite number >= 0 is allowed, such as 0.003 for 0.3 %")
    if objective not in ("time", "memory"):
        raise ConfigError(f"objective: found {objective!r}; allowed are 'time' and 'memory', or pass cost=")
    if measure not in ("model", "layer"):
        raise ConfigError(f"measure: found {measure!r}; allowed are 'model' and 'layer'")
    schemes = list(dict.fromkeys(parse_scheme(candidate).name for candidate in candidates))
    if not schemes:
        raise ConfigError(f"candidates: found none; choose among {', '.join(CANDIDATES)}")
    return schemes


def _units(modules: dict[str, nn.Module]) -> list[_Unit]:
    units: dict[tuple[Any, ...], _Unit] = {}
    for name, module in modules.items():
        units.setdefault(tensor_key(weight_of(module)), _Unit([])).names.append(name)
    return list(units.values())


def _prepare(
    unit: _Unit,
    modules: dict[str, nn.Module],
    schemes: list[str],
    calibration: Calibration,
    cost: CostModel,
    ranges: dict[str, tuple[StaticRange, str]],
) -> None:
    """Quantize a unit under every scheme; cost it, and measure its own error."""
    for scheme in schemes:
        unit.cost[scheme] = unit.sensitivity[scheme] = 0.0
        for name in unit.names:
            module = modules[name]
            n, k = weight_nk(module).shape
            calibration.check(name, k)
            parameters = [p for p in module._parameters.values() if p is not None]
            size = LayerSize(name, n, k, len(parameters) > 1, sum(p.nbytes for p in parameters))
            unit.cost[scheme] += cost(size, scheme)
            if scheme == "fp16":
                continue
            static_range = None
            if scheme == "w8a8_static":
                ranges[name] = best_range(module, name, calibration)
                static_range = ranges[name][0]
            layer = Linear.from_float(module, scheme, static_range=static_range, name=name)
            for owner in _same_weight(unit, scheme):
                layer.tie_to(owner)
            unit.layers.setdefault(scheme, {})[name] = layer
            unit.sensitivity[scheme] += output_error(module, layer, calibration.stats(name).sample)


def _same_weight(unit: _Unit, scheme: str) -> list[Linear]:
    """A layer whose quantized weight serves this scheme too: int8 ones are all alike, codebooks each their own."""
    is_codebook = isinstance(parse_scheme(scheme), Codebook)
    alike = {scheme} if is_codebook else {s for s in unit.layers if not isinstance(parse_scheme(s), Codebook)}
    return [layer for s in alike & unit.layers.keys() for layer in unit.layers[s].values()][:1]


def _reason(unit: _Unit, scheme: str, metric: str, measure: str) -> str:
    cheapest = _cheapest(unit)
    if scheme == cheapest:
        return ""
    what = metric if measure == "model" else "its output error"
    return (
        f"{what} +{unit.sensitivity[cheapest]:.3%} with {cheapest} alone, +{unit.sensitivity[scheme]:.3%} with {scheme}"
    )


class _Search:
    def __init__(self, units: list[_Unit], judge: Judge, budget: float, additive: bool) -> None:
        self.units, self.judge, self.budget, self.additive = units, judge, budget, additive
        self.seen: dict[_Choice, float] = {}

    def loss(self, choice: _Choice) -> float:
        """Measured, of the model with all layers of the choice in place."""
        if choice not in self.seen:
            variant = {
                name: layer
                for unit, scheme in zip(self.units, choice, strict=True)
                for name, layer in unit.layers.get(scheme, {}).items()
            }
            self.seen[choice] = (
                self.judge.losses([variant], f"measure plan {len(self.seen) + 1}")[0] if variant else 0.0
            )
        return self.seen[choice]

    def run(self) -> tuple[_Choice, float, float]:
        """The choice, its measured loss, and the loss of the cheapest choice."""
        path = self.path()
        start = self.loss(path[0])
        # The loss of path[above] is within the budget, that of path[below] is not.
        below, above = 0, len(path) - 1
        if start <= self.budget:
            above = 0
        elif self.loss(path[above]) > self.budget:
            raise PlanError(
                f"no plan meets the budget of {self.budget:.3%} ({self.judge.metric}): every layer on its most exact "
                f"candidate still loses {self.loss(path[above]):.3%}; allow more, or add candidates such as 'fp16'"
            )
        while above - below > 1:
            middle = (above + below) // 2
            below, above = (below, middle) if self.loss(path[middle]) <= self.budget else (middle, above)
        choice = self.undo(path[above], path[0])
        return choice, self.loss(choice), start

    def path(self) -> list[_Choice]:
        """From the cheapest choice to the most exact one, by sensitivity saved per cost added."""
        choice = [_cheapest(unit) for unit in self.units]
        path = [tuple(choice)]
        while True:
            moves = [
                (saved / max(unit.cost[scheme] - unit.cost[choice[i]], 1e-12), i, scheme)
                for i, unit in enumerate(self.units)
                for scheme in unit.cost
                if (saved := unit.sensitivity[choice[i]] - unit.sensitivity[scheme]) > 0
            ]
            if not moves:
                # Sensitivities can tie at 0: at the very end, the dearest of the tied is taken as the most exact.
                return [*path, tuple(_most_exact(unit) for unit in self.units)]
            _, i, scheme = max(moves, key=lambda move: move[0])
            choice[i] = scheme
            path.append(tuple(choice))

    def undo(self, choice: _Choice, start: _Choice) -> _Choice:
        """Try each moved layer on every cheaper scheme, the greatest savings first; keep what the budget allows."""
        trials = [
            (unit.cost[scheme] - unit.cost[choice[i]], i, scheme)
            for i, unit in enumerate(self.units)
            for scheme in unit.cost
            if choice[i] != start[i] and unit.cost[scheme] < unit.cost[choice[i]]
        ]
        for _, i, scheme in sorted(trials):
            unit, now = self.units[i], choice[i]
            added = unit.sensitivity[scheme] - unit.sensitivity[now]
            hopeless = self.additive and added > 2 * (self.budget - self.loss(choice))
            if unit.cost[scheme] < unit.cost[now] and not hopeless:
                trial = (*choice[:i], scheme, *choice[i + 1 :])
                if self.loss(trial) <= self.budget:
                    choice = trial
        return choice


def _cheapest(unit: _Unit) -> str:
    return min(unit.cost, key=lambda scheme: (unit.cost[scheme], unit.sensitivity[scheme]))


def _most_exact(unit: _Unit) -> str:
    return min(unit.cost, key=lambda scheme: (unit.sensitivity[scheme], -unit.cost[scheme]))
