"""A model's layers under every candidate scheme, with what each costs and loses by itself."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qcut.common.progress import with_progress
from qcut.conversion.calibration.calibrate import Calibration, calibrate
from qcut.conversion.calibration.fused_projections import fused_projections
from qcut.conversion.calibration.observers import input_hooks, run_observed
from qcut.conversion.calibration.second_order import channel_weights, expected_loss
from qcut.conversion.fitting import fitting_scheme
from qcut.conversion.planning.budget import Budget
from qcut.conversion.planning.costs import CostModel, LayerSize
from qcut.conversion.planning.sensitivity import Judge, as_loss, best_range, output_error
from qcut.conversion.tasks import Task, moment_of, quantized_together
from qcut.errors import CalibrationError, ConfigError, PlanError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.models.modules import (
    ExpertsModule,
    check_batches,
    forward,
    input_ids_of,
    tensor_key,
    tied_elsewhere,
    weight_nk,
    weight_of,
)
from qcut.models.selection import expert_layers, find_layers, globs
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Float, Scheme, StaticRange

Measure = Literal["model", "gradient", "layer"]
Choice = tuple[str, ...]
"""A scheme per group."""
Passes = Mapping[tuple[str, str], Sequence[RotatedCodebook]]
"""Passes of codebook weights, by the scheme's name and the layer's."""
_FLOAT = ""
"""The candidate's name for a group that no candidate serves."""


@dataclass
class Group:
    """Layers that get one scheme, since they share a weight or a product; nearly always one layer.

    Attributes:
        names: the layers.
        stack: the projection that has these experts; empty for other layers.
        layers: per scheme, the quantized layers; nothing for ``fp16``.
        cost: per scheme.
        sensitivity: per scheme, the loss with only these layers quantized.
    """

    names: list[str]
    stack: str = ""
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


def groups_of(
    modules: Mapping[str, nn.Module],
    projections: Sequence[Sequence[str]],
    stacks: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Group]:
    """Layers that share a weight, are fused projections or one of experts are a group; in the order of the layers."""
    owner = {name: name for name in modules}

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    first: dict[tuple[Any, ...], str] = {}
    pairs = [(first.setdefault(tensor_key(weight_of(module)), name), name) for name, module in modules.items()]
    pairs += [(names[0], name) for names in (*projections, *stacks.values()) for name in names[1:]]
    order = {name: i for i, name in enumerate(modules)}
    for a, b in pairs:
        low, high = sorted((root(a), root(b)), key=order.__getitem__)
        owner[high] = low
    groups: dict[str, Group] = {}
    stack_of = {name: stack for stack, names in stacks.items() for name in names}
    for name in modules:
        groups.setdefault(root(name), Group([], stack_of.get(name, ""))).names.append(name)
    return list(groups.values())


class SearchSpace:
    """A float model's layers under every candidate scheme; plans within any budget come from one.

    Call `check` first, then `quantize` and `measure`.

    Args:
        model: not changed.
        batches: what the model is called on.
        schemes: the candidates.
        calibration: of the model; None calibrates on the batches, if it is needed.
        second_moments: of the layers' inputs, to fit codebooks to; None rounds to the nearest.
        measure: see `qcut.plan`.
        together: give fused projections, which the engine computes by one product, one scheme.
        sensitivity_batches: how many of the batches sensitivities are measured on; None: all.
        include: globs of layers to take; None takes every linear layer.
        skip: globs of layers to leave.
        progress: show progress bars.
        passes: codebooks that are made already, by the scheme's name and the layer's; the others are made here.

    Attributes:
        modules: the float layers by name.
        stacks: of experts, the layers of each projection.
        projections: names of fused projections.
        groups: `Group`, with costs after `check`, and quantized layers after `quantize`.
        costs: by layer and scheme.
        ranges: static range and its method, by layer that could use one.
        judge: measures losses of the model.
        additive: whether sensitivities are losses of the model, which add up.
        fitted: whether codebooks are fitted to second moments.

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
        self.modules, tied = _layers_to_plan(model, include, skip)
        self.stacks = expert_layers(model, self.modules)
        self._experts = _experts_of(model, self.stacks)
        self._routes = routes_of(model, self._batches[0], self._experts) if self._experts else {}
        self.projections = fused_projections(model, self._batches, self.modules)
        if calibration is None and (measure != "model" or any(scheme.needs_range for scheme in schemes)):
            calibration = calibrate(model, self._batches, layers=include, skip=(*skip, *tied), progress=progress)
        self._measure, self._few, self._calibration = measure, sensitivity_batches, calibration
        self._moments, self._passes = second_moments, passes or {}
        self.additive, self.fitted = measure != "layer", second_moments is not None
        joined = self.projections if together else []
        products = [*joined, *self.stacks.values()]
        self._rows: dict[str, int] = {}
        for names in products:
            self._rows |= dict.fromkeys(names, sum(len(weight_nk(self.modules[n])) for n in names))
        self.groups = groups_of(self.modules, joined, self.stacks)
        self.costs: dict[str, dict[str, float]] = {}
        self.ranges: dict[str, tuple[StaticRange, str]] = {}
        self._named = [scheme.name for scheme in schemes]
        self._fits = [self._fitting(group, schemes) for group in self.groups]
        self.judge = Judge(model, self._batches, progress)

    @property
    def weights(self) -> int:
        """N times K of all layers together."""
        return sum(weight_nk(module).numel() for module in self.modules.values())

    def check(self, budget: Budget) -> None:
        """Compute costs; raise `PlanError` if every layer on its cheapest candidate costs more than the budget."""
        self._price(budget.cost)
        limit, least = budget.limit(self.weights), sum(min(group.cost.values()) for group in self.groups)
        if limit is not None and least > limit:
            raise budget.impossible(least, self.weights)

    def forecast(self, budget: Budget) -> tuple[int, float]:
        """Passes of the model that measure single layers, and their seconds by the time of the first pass.

        A budget of cost measures the layers twice. Not included are the candidates, which are quantized before, and
        whole plans, which are measured after.
        """
        batches = len(self._batches[: self._few])
        schemes = [list(dict.fromkeys(fits.values())) for fits in self._fits]
        passes = 1 + sum(not scheme.is_float for row in schemes for scheme in row)
        if budget.loss is None:
            passes += 2 + sum(len(row) - 1 for row in schemes)  # the float model and the first choice, too
        return passes * batches, passes * batches * self.judge.pass_s

    def quantize(self) -> None:
        """Quantize every group under every scheme that it can have."""
        both = list(zip(self.groups, self._fits, strict=True))
        for group, fits in with_progress(both, "quantize candidates", "layer", shown=self._progress):
            for scheme in dict.fromkeys(fits.values()):
                group.sensitivity[scheme.name] = 0.0
                for name, layer in () if scheme.is_float else self._layers(group, scheme):
                    weight = tensor_key(weight_of(self.modules[name]))
                    for owner, made in ((o, one) for layers in group.layers.values() for o, one in layers.items()):
                        if not group.stack or tensor_key(weight_of(self.modules[owner])) == weight:
                            layer.tie_to(made)
                    group.layers.setdefault(scheme.name, {})[name] = layer

    def measure(self) -> None:
        """Measure sensitivities, after `quantize`."""
        pairs = [(group, scheme) for group in self.groups for scheme in group.layers]
        if self._measure == "model":
            losses = self.nearby([group.layers[scheme] for group, scheme in pairs], "sensitivity")
        elif self._measure == "layer":
            losses = [sum(self._errors(group.layers[scheme], None)) for group, scheme in pairs]
        else:
            few, metric = self._batches[: self._few], self.judge.metric
            weights = channel_weights(self._model, few, self.modules, metric, progress=self._progress)
            losses = [as_loss(sum(self._errors(group.layers[scheme], weights)), metric) for group, scheme in pairs]
        for (group, scheme), loss in zip(pairs, losses, strict=True):
            group.sensitivity[scheme] = loss

    def nearby(self, variants: Sequence[Mapping[str, nn.Module]], what: str) -> list[float]:
        """Losses of variants of the model on the batches that sensitivities are measured on; see `Judge.losses`."""
        return self.judge.losses(variants, what, self._few)

    def uniform(self) -> dict[str, Choice]:
        """Every candidate that all groups can have, as a choice; a group that no candidate serves stays as it is."""
        choices = {}
        for name in self._named:
            schemes = [fits.get(name) or (Float() if _FLOAT in fits else None) for fits in self._fits]
            names = tuple(scheme.name for scheme in schemes if scheme is not None)
            if len(names) == len(schemes):
                choices[name] = names
        return choices

    def _price(self, cost: CostModel) -> None:
        self.costs = {name: {} for name in self.modules}
        for group, fits in zip(self.groups, self._fits, strict=True):
            group.cost = {}
            for scheme in dict.fromkeys(fits.values()):
                for name in group.names:
                    self.costs[name][scheme.name] = cost(self._size(name), scheme.name)
                group.cost[scheme.name] = sum(self.costs[name][scheme.name] for name in group.names)

    def _errors(self, layers: Mapping[str, Linear], weights: Mapping[str, Tensor] | None) -> list[float]:
        """Errors of the layers' own outputs; with weights, estimates of what these add to the model's loss."""
        assert self._calibration is not None
        found = []
        seen = [self._calibration.stats(name).tokens for name in layers]
        for (name, layer), tokens in zip(layers.items(), seen, strict=True):
            module, sample = self.modules[name], self._calibration.stats(name).sample
            if weights is None:
                # An expert's error counts as often as it is chosen.
                share = tokens / max(1, sum(seen)) if name in self._routes else 1.0
                found.append(share * output_error(module, layer, sample))
            else:
                found.append(expected_loss(module, layer, sample, weights[name]))
        return found

    def _fitting(self, group: Group, schemes: Sequence[Scheme]) -> dict[str, Scheme]:
        """By candidate, the scheme that it means for a group. A group that would grow under all of them stays."""
        first = self.modules[group.names[0]]
        fits = {s.name: s if s.is_float else fitting_scheme(first, s).scheme for s in schemes}
        return {name: scheme for name, scheme in fits.items() if scheme is not None} or {_FLOAT: Float()}

    def _layers(self, group: Group, scheme: Scheme) -> Iterator[tuple[str, Linear]]:
        """A group's layers under a scheme, by name; the experts of a projection are made together."""
        for batch in [group.names] if group.stack else [[name] for name in group.names]:
            tasks = {name: self._task(name, scheme) for name in batch if not self._passes.get((scheme.name, name))}
            made = quantized_together(tasks, [task.module for task in tasks.values()]) if tasks else []
            layers = dict(zip(tasks, made, strict=True))
            for name in batch:
                yield name, layers.get(name) or self._of_passes(name, scheme)

    def _of_passes(self, name: str, scheme: Scheme) -> Linear:
        module = self.modules[name]
        layer = CodebookLinear.from_passes(
            self._passes[scheme.name, name], module._parameters.get("bias"), scheme, name=name
        )
        if layer.scheme != scheme:
            raise ConfigError(f"layer {name!r}: passes are of {layer.scheme.name}; {scheme.name} is needed")
        layer.weight_dtype = weight_of(module).dtype
        return layer

    def _task(self, name: str, scheme: Scheme) -> Task:
        task = Task(self.modules[name], scheme, name=name)
        if scheme.needs_range:
            assert self._calibration is not None
            self.ranges[name] = best_range(task.module, scheme, name, self._calibration)
            task.static_range = self.ranges[name][0]
        if self._moments is not None and scheme.takes_second_moments:
            task.moments = {name: moment_of(self._moments, name, task.module)}
        return task

    def _size(self, name: str) -> LayerSize:
        module = self.modules[name]
        n, k = weight_nk(module).shape
        if self._calibration is not None:
            self._calibration.check(name, k)
        parameters = [p for p in module._parameters.values() if p is not None]
        size = sum(p.nbytes for p in parameters)
        experts, routes = self._experts.get(name), self._routes.get(name, 1)
        count = 0 if experts is None else experts.num_experts
        return LayerSize(name, n, k, len(parameters) > 1, size, self._rows.get(name, n), count, routes)


def _layers_to_plan(
    model: nn.Module, include: Sequence[str] | None, skip: Sequence[str]
) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers, and others that could be if their weights were not used by something else too."""
    modules = find_layers(model, include, skip)
    tied = list(tied_elsewhere(model, modules))
    for name in tied:
        del modules[name]
    if not modules:
        raise PlanError(f"{type(model).__name__}: no layer to plan for: every weight is tied to something else")
    return modules, tied


def _experts_of(model: nn.Module, stacks: Mapping[str, Sequence[str]]) -> dict[str, ExpertsModule]:
    """By layer of an expert, the experts that it is of.

    Raises:
        ConfigError: of the experts of a projection, some have no layer to plan for.
    """
    found: dict[str, ExpertsModule] = {}
    for stack, names in stacks.items():
        experts = model.get_submodule(stack.rpartition(".")[0])
        assert isinstance(experts, ExpertsModule)
        if len(names) < experts.num_experts:
            raise ConfigError(
                f"layer {stack!r}: {len(names)} of its {experts.num_experts} experts are to be planned for, such as "
                f"{names[0]!r}; all of a projection or none is allowed: {stack!r} names them"
            )
        found |= dict.fromkeys(names, experts)
    return found


@torch.no_grad()
def routes_of(model: nn.Module, batch: Any, experts: Mapping[str, ExpertsModule]) -> dict[str, int]:
    """By layer of an expert, how many experts a token goes to.

    Where experts are not called with routes, it is the number of rows that their layers get by token id of the batch;
    all experts if the batch has no token ids.
    """
    found: dict[int, int] = {}
    rows: Counter[str] = Counter()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        routes = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get("top_k_index")
        if routes is not None:
            found[id(module)] = routes.shape[1]

    def count(name: str, x: Tensor) -> None:
        rows[name.rpartition(".")[0]] += x.shape[0]

    hooks = (partial(one.register_forward_pre_hook, note, with_kwargs=True) for one in set(experts.values()))
    layers = {name: model.get_submodule(name) for name in experts}
    run_observed(
        model, [batch], [*hooks, *input_hooks(layers, count)], partial(forward, model), "routes", progress=False
    )
    ids = input_ids_of(batch)
    tokens = 0 if ids is None else ids.numel()
    for name, one in experts.items():
        if tokens and (seen := rows[name.rpartition(".")[0]]):
            found.setdefault(id(one), min(one.num_experts, -(-seen // tokens)))
    return {name: found.get(id(one), one.num_experts) for name, one in experts.items()}
