"""`plan`: measures which layers tolerate which scheme, and spends a quality budget where it saves most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

from qcut.config import Float, Scheme, StaticRange, parse_scheme
from qcut.conversion.calibration import Calibration, calibrate
from qcut.conversion.costs import CostModel, LayerSize, TimeCost, memory_cost
from qcut.conversion.fitting import fitting_scheme
from qcut.conversion.plan import LayerPlan, Plan
from qcut.conversion.search import Search, TiedLayers
from qcut.conversion.sensitivity import Judge, best_range, output_error
from qcut.errors import CalibrationError, ConfigError, PlanError
from qcut.layers.base import Linear
from qcut.models.modules import tensor_key, tied_elsewhere, weight_nk, weight_of
from qcut.models.selection import DEFAULT_SKIP, find_layers
from qcut.process.progress import with_progress

__all__ = ["Plan", "plan"]

CANDIDATES = ("w8a8_static", "w8a8", "w8a16", "fp16")


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
    4. Every move is then undone on trial, the moves that save most first, and stays undone where the measured loss is
       within the budget. Moves whose own sensitivity is more than twice the rest of the budget are not tried.

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
        candidates: schemes that may be used: names or objects, codebooks too. As in `qcut.quantize`, a codebook whose
            Hadamard rotation does not take a layer's K is tried with the rotation ``qr`` there, and a layer that would
            grow under all candidates stays in float.
        calibration: of this model as it is now; by default the batches are used for it.
        measure: the sensitivity of step 2: ``model`` or ``layer``.
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
    modules = _layers_to_plan(model, include, skip)
    if calibration is None:
        calibration = calibrate(model, batches, layers=list(modules), skip=skip, progress=progress)
    if cost is None:
        cost = TimeCost() if objective == "time" else memory_cost

    judge = Judge(model, batches, progress)
    groups = _groups(modules)
    ranges: dict[str, tuple[StaticRange, str]] = {}
    for group in with_progress(groups, "quantize candidates", "layer", shown=progress):
        _quantize_candidates(group, modules, schemes, calibration, cost, ranges)
    if measure == "model":
        _measure_alone(groups, judge, sensitivity_batches)

    def loss(variant: dict[str, Linear], number: int) -> float:
        return judge.losses([variant], f"measure plan {number}")[0]

    search = Search(groups, loss, budget, judge.metric, additive=measure == "model")
    choice, measured, start = search.run()
    layers: dict[str, LayerPlan] = {}
    for group, scheme in zip(groups, choice, strict=True):
        reason = _reason(group, scheme, judge.metric if measure == "model" else "its output error")
        for name in group.names:
            n, k = weight_nk(modules[name]).shape
            static_range, method = ranges.get(name, (None, ""))
            layers[name] = LayerPlan(scheme, k, n, static_range, method, group.sensitivity, group.cost, reason)
    ordered = {name: layers[name] for name in modules}
    predicted = (
        sum(group.sensitivity[s] for group, s in zip(groups, choice, strict=True)) if measure == "model" else None
    )
    counted = objective if cost is memory_cost or isinstance(cost, TimeCost) else "custom"
    return Plan(ordered, budget, judge.metric, counted, predicted, measured, start, judge.tokens)


def _check(budget: float, objective: str, candidates: Sequence[str | Scheme], measure: str) -> list[Scheme]:
    if not budget >= 0 or not math.isfinite(budget):
        raise ConfigError(f"budget: found {budget}; a finite number >= 0 is allowed, such as 0.003 for 0.3 %")
    if objective not in ("time", "memory"):
        raise ConfigError(f"objective: found {objective!r}; allowed are 'time' and 'memory', or pass cost=")
    if measure not in ("model", "layer"):
        raise ConfigError(f"measure: found {measure!r}; allowed are 'model' and 'layer'")
    schemes = list(dict.fromkeys(map(parse_scheme, candidates)))
    if not schemes:
        raise ConfigError(f"candidates: found none; choose among {', '.join(CANDIDATES)}")
    return schemes


def _layers_to_plan(model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]) -> dict[str, nn.Module]:
    modules = find_layers(model, include, skip)
    for name in tied_elsewhere(model, modules):
        del modules[name]
    if not modules:
        raise PlanError(f"{type(model).__name__}: no layer to plan for: every weight is tied to something else")
    return modules


def _groups(modules: dict[str, nn.Module]) -> list[TiedLayers]:
    groups: dict[tuple[Any, ...], TiedLayers] = {}
    for name, module in modules.items():
        groups.setdefault(tensor_key(weight_of(module)), TiedLayers([])).names.append(name)
    return list(groups.values())


def _quantize_candidates(
    group: TiedLayers,
    modules: dict[str, nn.Module],
    schemes: list[Scheme],
    calibration: Calibration,
    cost: CostModel,
    ranges: dict[str, tuple[StaticRange, str]],
) -> None:
    """Quantize a group under every scheme that it can have; cost it, and measure its own error."""
    first = modules[group.names[0]]
    fits = [scheme if scheme.is_float else fitting_scheme(first, scheme).scheme for scheme in schemes]
    # A layer that no candidate serves, or that would grow under all of them, stays.
    for scheme in dict.fromkeys([fit for fit in fits if fit is not None] or [Float()]):
        group.cost[scheme.name] = group.sensitivity[scheme.name] = 0.0
        for name in group.names:
            module = modules[name]
            n, k = weight_nk(module).shape
            calibration.check(name, k)
            parameters = [p for p in module._parameters.values() if p is not None]
            size = LayerSize(name, n, k, len(parameters) > 1, sum(p.nbytes for p in parameters))
            group.cost[scheme.name] += cost(size, scheme.name)
            if scheme.is_float:
                continue
            static_range = None
            if scheme.needs_range:
                ranges[name] = best_range(module, scheme, name, calibration)
                static_range = ranges[name][0]
            layer = Linear.from_float(module, scheme, static_range=static_range, name=name)
            for owner in group.quantized():
                layer.tie_to(owner)
            group.layers.setdefault(scheme.name, {})[name] = layer
            group.sensitivity[scheme.name] += output_error(module, layer, calibration.stats(name).sample)


def _measure_alone(groups: list[TiedLayers], judge: Judge, max_batches: int | None) -> None:
    """Make sensitivities the model's loss with one group quantized."""
    pairs = [(group, scheme) for group in groups for scheme in group.layers]
    losses = judge.losses([group.layers[scheme] for group, scheme in pairs], "sensitivity", max_batches)
    for (group, scheme), loss in zip(pairs, losses, strict=True):
        group.sensitivity[scheme] = loss


def _reason(group: TiedLayers, scheme: str, metric: str) -> str:
    """Why a group is not on its cheapest scheme; empty where it is."""
    cheapest = group.cheapest
    if scheme == cheapest:
        return ""
    alone, chosen = group.sensitivity[cheapest], group.sensitivity[scheme]
    return f"{metric} +{alone:.3%} with {cheapest} alone, +{chosen:.3%} with {scheme}"
