"""`plan`: measures which layers tolerate which scheme, and spends a budget where it saves most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from qcut.common.numbers import check_integer
from qcut.common.progress import FIRST_LINE_S, print_above
from qcut.conversion.calibration.calibrate import Calibration
from qcut.conversion.planning.assign import curve, predicted, within_cost, within_loss
from qcut.conversion.planning.budget import Budget
from qcut.conversion.planning.costs import CostModel
from qcut.conversion.planning.measure import Group, Measure, SearchSpace
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.conversion.tasks import check_given
from qcut.errors import ConfigError
from qcut.layers.experts.opening import opened
from qcut.models.modules import weight_nk
from qcut.models.selection import DEFAULT_SKIP, check_model
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.plain_state import in_plain_state
from qcut.schemes import Scheme

__all__ = ["Plan", "plan"]


@in_plain_state
def plan(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: float | None = None,
    bits: float | None = None,
    step_us: float | None = None,
    objective: Literal["time", "memory"] | None = None,
    candidates: Sequence[str | Scheme] | None = None,
    calibration: Calibration | None = None,
    second_moments: Mapping[str, Tensor | Curvature] | None = None,
    measure: Measure = "model",
    cost: CostModel | None = None,
    together: bool | None = None,
    sensitivity_batches: int | None = 1,
    include: Sequence[str] | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    progress: bool = True,
) -> Plan:
    """Choose a scheme per layer: the least cost within a loss (``budget``), or the least loss within a cost.

    The cost is limited by ``bits``, an average over all weights, or by ``step_us``, the time of a step's linear layers.

    1. Every layer is quantized under every candidate; static ranges are the calibrated range (minmax, quantile or
       mse) that disturbs the layer's output least.
    2. Sensitivity: with ``measure="model"`` the model's loss with only that layer quantized. Where a forward call per
       layer and scheme is too much, ``"gradient"`` estimates this loss from the error of the layer's own output and one
       backward pass for all layers (`qcut.conversion.calibration.second_order`), and ``"layer"`` takes the relative
       squared error of the layer's own output.

    Within a loss, all layers start on their cheapest scheme. Moves to dearer ones are ordered by sensitivity saved per
    cost added. Bisection finds the shortest run of moves that brings the loss within the budget, measured on the model
    with all of them made: errors of layers do not add up, so sums of sensitivities decide the order and nothing else.
    Every move is then undone on trial, the moves that save most first, and stays undone if the measured loss is within
    the budget. Moves with a sensitivity of more than twice the rest of the budget are not tried.

    Within a cost, the schemes whose sensitivities add up to the least are found exactly
    (`qcut.conversion.planning.knapsack`; see `Plan.gap`). Around them each layer is measured again under each scheme,
    which shows what adding up missed, and the choice is made anew. Whole choices are measured, uniform ones among them;
    the best within the limit is taken.

    The loss is the relative increase of perplexity for language models, and the relative squared error of the output
    for others; see `qcut.conversion.planning.sensitivity.Judge`. To use smoothing, call `qcut.smooth(model,
    calibration)` first
    and pass the same calibration: the plan then belongs to the smoothed model.

    All experts of a projection get one scheme: they are one layer of the plan, ``mlp.experts.up``, with a static range
    for each expert.

    Args:
        model: the float model; it is not changed. During the search, quantized copies of its layers exist too: one in
            int8, and one for each codebook among the candidates.
        batches: what the model is called on (see `qcut.calibrate`), held in a list: a few windows do. Not the text
            you will evaluate on.
        budget: the loss allowed: 0.003 is 0.3 % of perplexity. That is the default if no cost is limited.
        bits: bits a weight allowed on average, as a file holds them: indices or integers, norms, and scales of rows,
            all counted. ``codebook4`` has 4.125, ``codebook4+4`` 8.25. In memory a layer takes a little more
            (`qcut.conversion.planning.costs.stored_cost`).
        step_us: microseconds allowed for the linear layers of one step of one token; an estimate, by default that of an
            H200 (`qcut.conversion.planning.costs.StepCost`; ``cost=StepCost("NVIDIA L40S")`` is another GPU's).
        objective: what is least within a budget: ``time``, the default, or ``memory``
            (`qcut.conversion.planning.costs`).
        candidates: schemes that may be used: names or objects, codebooks too. As in `qcut.quantize`, a codebook with a
            Hadamard rotation that does not take a layer's K is tried with the rotation ``qr`` there, and a layer that
            would grow under all candidates stays in float. None: w8a8_static, w8a8, w8a8_rotated, w8a16 and fp16 within
            a loss; codebooks of 2, 3, 4 and 4+4 bits and w8a16 within a cost.
        calibration: of this model as it is now; by default the batches are used for it, if it is needed.
        second_moments: `qcut.collect_curvature` or `qcut.collect_second_moments` of this model: codebooks are fitted to
            them, here and, with the same argument, in `qcut.quantize`.
        measure: the sensitivity of step 2: ``model``, ``gradient`` or ``layer``.
        cost: a cost model of your own, instead of the objective's; within ``step_us``, one in µs.
        together: give layers that the engine computes by one product (q, k, v; gate, up) one scheme. None: within a
            cost. Where they differ, the engine computes them by several products, and `Plan.parted` names them.
        sensitivity_batches: how many of the batches sensitivities are measured on (None: all); whole plans are measured
            on all of them.
        include: globs of layers to plan for; None takes every linear layer.
        skip: globs of layers to leave as they are.
        progress: show progress bars, and with ``measure="model"`` first a line that says how many passes of the model
            there will be, and how long these take, if that is ten seconds and more.

    Returns:
        The `Plan`, static ranges included: `qcut.quantize(model, plan)` needs nothing else but the second moments, if
        any.

    Raises:
        PlanError: no combination of the candidates meets the budget or the limit; what is possible is named.
        ConfigError: an unknown scheme, objective or measure, no candidate, a budget or limit out of range, or two of
            them.
        CalibrationError: no batch, or a layer without calibration or second moment.
        QuantizationError: no layer, or a weight that cannot be quantized.

    Exactness: deterministic for a deterministic model. The measured loss is exact for these batches; how far it
    carries to other text depends on how many tokens and how alike they are.
    """
    if measure not in ("model", "layer", "gradient"):
        raise ConfigError(f"measure: found {measure!r}; allowed are 'model', 'layer' and 'gradient'")
    limit = Budget.of(budget, bits, step_us, objective, cost)
    schemes = limit.schemes(candidates)
    if sensitivity_batches is not None:
        check_integer(sensitivity_batches, "sensitivity_batches")
    check_model(model)
    check_given(calibration, second_moments)
    with opened(model):
        space = SearchSpace(
            model,
            batches,
            schemes,
            calibration=calibration,
            second_moments=second_moments,
            measure=measure,
            together=limit.loss is None if together is None else together,
            sensitivity_batches=sensitivity_batches,
            include=include,
            skip=skip,
            progress=progress,
        )
        space.check(limit)
        if progress and measure == "model":
            _announce(*space.forecast(limit))
        space.quantize()
        space.measure()
        return plan_within(space, limit)


def plan_within(space: SearchSpace, budget: Budget) -> Plan:
    """The plan for a budget, from measured layers.

    Raises:
        PlanError: no combination of the candidates meets the budget.
    """
    space.check(budget)
    groups, metric = space.groups, space.judge.metric
    found = within_cost(space, budget) if budget.loss is None else within_loss(space, budget.loss)
    layers: dict[str, LayerPlan] = {}
    unit_of = {name: stack for stack, names in space.stacks.items() for name in names}
    for group, scheme in zip(groups, found.choice, strict=True):
        reason = _reason(group, scheme, metric if space.additive else "its output error")
        n, k = weight_nk(space.modules[group.names[0]]).shape
        of_stacks = {unit_of[name]: space.stacks[unit_of[name]] for name in group.names if name in unit_of}
        for stack, names in of_stacks.items():
            ranges = [space.ranges[name] for name in names if name in space.ranges]
            methods = "/".join(sorted({method for _, method in ranges}))
            costs = {one: sum(space.costs[name][one] for name in names) for one in group.cost}
            found_by = None, methods, dict(group.sensitivity), costs, reason, [one for one, _ in ranges]
            layers[stack] = LayerPlan(scheme, k, n * len(names), *found_by)
        for name in (one for one in group.names if one not in unit_of):
            n, k = weight_nk(space.modules[name]).shape
            static_range, method = space.ranges.get(name, (None, ""))
            costs = dict(space.costs[name])
            layers[name] = LayerPlan(scheme, k, n, static_range, method, dict(group.sensitivity), costs, reason)
    return Plan(
        {unit: layers[unit] for unit in dict.fromkeys(unit_of.get(name, name) for name in space.modules)},
        budget.loss,
        metric,
        budget.objective,
        predicted(groups, found.choice, metric) if space.additive else None,
        found.measured,
        found.start,
        space.judge.tokens,
        found.limit,
        found.gap,
        curve(groups, metric) if space.additive else [],
        found.uniform,
        [list(names) for names in space.projections],
        space.fitted,
    )


def _announce(passes: int, seconds: float) -> None:
    """Print how long a plan takes at least, unless that is short."""
    if seconds >= FIRST_LINE_S:
        print_above(
            f"plan: {passes} passes of the model measure its layers, about {seconds:.0f} s by the first one; "
            "quantizing the candidates before, and measuring whole plans after, take more"
        )


def _reason(group: Group, scheme: str, metric: str) -> str:
    """Why a group is not on its cheapest scheme; empty if it is."""
    cheapest = group.cheapest
    if scheme == cheapest:
        return ""
    alone, chosen = group.sensitivity[cheapest], group.sensitivity[scheme]
    return f"{metric} +{alone:.3%} with {cheapest} alone, +{chosen:.3%} with {scheme}"
