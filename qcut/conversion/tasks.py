"""Decides, before `qcut.quantize` begins, how each layer will be quantized."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qcut.conversion.fitting import fitting_scheme
from qcut.errors import CalibrationError, ConfigError, DtypeError, PlanError, QuantizationError
from qcut.layers.experts.opening import Opened
from qcut.layers.linear import Known, Linear
from qcut.models.modules import tied_elsewhere, weight_nk
from qcut.models.selection import (
    DEFAULT_SKIP,
    check_model,
    expert_layers,
    expert_stacks,
    find_layers,
    float_by_default,
    linear_layers,
    matches,
    summary_of,
)
from qcut.schemes import ALLOWED_SCHEMES, Scheme, StaticRange, parse_scheme

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from qcut.conversion.calibration.calibrate import Calibration
    from qcut.conversion.planning.plan import Plan
    from qcut.numerics.codebook.fitting.curvature import Curvature


@dataclass
class Task:
    """How one layer will be quantized.

    Attributes:
        module: the layer.
        scheme: its new scheme.
        static_range: calibrated range of the layer's input, for schemes that need one.
        activation: activation that the layer computes after its bias.
        moments: by layer, what codebooks are fitted to; None if this layer is not.
        scale: float32 ``[K]``, what smoothing multiplies the weight's columns by and divides the input by; or None.
        note: why the scheme is not the requested one; empty if it is.
        name: of the layer in ``moments``.
    """

    module: nn.Module
    scheme: Scheme
    static_range: StaticRange | None = None
    activation: str = "none"
    moments: Mapping[str, Tensor | Curvature] | None = None
    scale: Tensor | None = None
    note: str = ""
    name: str = ""

    @property
    def second_moment(self) -> Tensor | Curvature | None:
        """What `moment_of` has for the layer, divided by the scale as the layer's input is."""
        if self.moments is None:
            return None
        # Where all were there, `add_second_moments` has checked them; since then the weight may have been cut in parts.
        in_turns = getattr(self.moments, "in_turns", False)
        moment = moment_of(self.moments, self.name, self.module) if in_turns else self.moments[self.name]
        if self.scale is None:
            return moment
        if not isinstance(moment, Tensor):
            return moment.divided(self.scale)
        inverse = 1 / self.scale.to(moment.device, moment.dtype)
        return moment * inverse[:, None] * inverse

    def quantized(self, source: nn.Module, name: str) -> Linear:
        """The quantized layer of a float one, under this task's scheme; errors as of `Linear.from_float`."""
        return quantized_together({name: self}, [source])[0]

    @property
    def is_fitted(self) -> bool:
        """Whether there is a second moment."""
        return self.moments is not None


def quantized_together(tasks: Mapping[str, Task], sources: Sequence[nn.Module]) -> list[Linear]:
    """The quantized layers of float ones, of one size and scheme; errors as of `Linear.from_float`.

    Args:
        tasks: by the layers' names; experts of one projection, or one layer.
        sources: of each, the float layer, scaled as the task says.
    """
    return Linear.all_from_float(
        sources,
        next(iter(tasks.values())).scheme,
        [task.activation for task in tasks.values()],
        [Known(task.static_range, task.second_moment) for task in tasks.values()],
        list(tasks),
    )


def layer_tasks(
    model: nn.Module,
    scheme: str | Scheme | Plan,
    calibration: Calibration | None,
    include: Sequence[str] | None,
    skip: Sequence[str] | None,
    allow_growth: bool = False,
) -> tuple[dict[str, Task], dict[str, str]]:
    """What each layer becomes, and why the others stay; arguments are those of `qcut.quantize`.

    Raises:
        DtypeError: the model is no ``nn.Module``.
        ConfigError: an unknown scheme, ``fp16`` for the whole model, or a calibration that is missing.
        CalibrationError: a layer was not calibrated.
        PlanError: the plan names layers or sizes that the model does not have, or splits tied layers.
        QuantizationError: there is no layer to quantize.
    """
    check_model(model)
    patterns = tuple(skip or ()) if is_plan(scheme) else tuple(DEFAULT_SKIP if skip is None else skip)
    parsed = scheme if is_plan(scheme) else uniform_scheme(scheme, calibration)
    every, left_in_float = linear_layers(model)
    chosen = find_layers(model, include, patterns, (every, left_in_float))
    skipped = dict(left_in_float)
    if is_plan(parsed):
        tasks, left = _planned_tasks(model, parsed, every)
        tasks = {name: task for name, task in tasks.items() if name in chosen}
    else:
        tasks, left = _uniform_tasks(model, parsed, calibration, chosen, allow_growth)
    skipped |= left
    stay, stacks = float_by_default(model, every) if include is None else {}, expert_stacks(model)
    for name in every:
        if name not in tasks and name not in skipped:
            skipped[name] = "matched by skip" if matches(name, patterns, stacks) else stay.get(name, "not in include")
    if not tasks:
        raise QuantizationError(f"{type(model).__name__}: no layer to quantize: {summary_of(skipped)}")
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return tasks, dict(sorted(skipped.items(), key=lambda item: order[item[0]]))


def is_plan(scheme: str | Scheme | Plan) -> TypeIs[Plan]:
    """Whether this is a plan. Its module is imported only if it may be one."""
    if isinstance(scheme, str | Scheme):
        return False
    from qcut.conversion.planning.plan import Plan

    return isinstance(scheme, Plan)


def check_given(calibration: Any, second_moments: Any = None) -> None:
    """Check that these are of the types that `qcut.calibrate` and `qcut.collect_second_moments` return, or None.

    Raises:
        DtypeError: one is of another type (named).
    """
    if calibration is not None:
        from qcut.conversion.calibration.calibrate import Calibration

        if not isinstance(calibration, Calibration):
            raise DtypeError(f"calibration: found {type(calibration).__name__}; what qcut.calibrate returns is needed")
    if second_moments is not None and not isinstance(second_moments, Mapping):
        raise DtypeError(
            f"second_moments: found {type(second_moments).__name__}; what qcut.collect_second_moments or "
            "qcut.collect_curvature returns is needed, a mapping from layer names"
        )


def uniform_scheme(scheme: str | Scheme, calibration: Calibration | None) -> Scheme:
    """A scheme for all layers.

    Raises:
        ConfigError: no such scheme, a scheme that quantizes nothing, or one that needs a calibration and has none.
    """
    scheme = parse_scheme(scheme)
    if scheme.is_float:
        raise ConfigError(f"scheme {scheme.name!r} leaves every layer as it is; {ALLOWED_SCHEMES}")
    if scheme.needs_range and calibration is None:
        raise ConfigError(f"scheme {scheme.name!r} needs calibration=qcut.calibrate(model, batches) of the float model")
    return scheme


def _uniform_tasks(
    model: nn.Module,
    scheme: Scheme,
    calibration: Calibration | None,
    chosen: Mapping[str, nn.Module],
    allow_growth: bool,
) -> tuple[dict[str, Task], dict[str, str]]:
    """One scheme for all chosen layers that it fits."""
    fits = {name: fitting_scheme(module, scheme, allow_growth) for name, module in chosen.items()}
    # A layer that stays keeps what it shares its weight with in float too.
    tied = tied_elsewhere(model, {name: chosen[name] for name, fit in fits.items() if fit.scheme is not None})
    tasks: dict[str, Task] = {}
    left: dict[str, str] = {}
    for name, module in chosen.items():
        fit = fits[name]
        if fit.scheme is None:
            left[name] = fit.reason
        elif name in tied:
            left[name] = f"its weight is tied to {tied[name]!r}"
        else:
            static_range = calibration.range(name) if scheme.needs_range and calibration else None
            tasks[name] = Task(module, fit.scheme, static_range, note=fit.reason)
    return tasks, left


def _planned_tasks(model: nn.Module, plan: Plan, every: dict[str, nn.Module]) -> tuple[dict[str, Task], dict[str, str]]:
    """Each layer of a plan under its own scheme; of experts, all of a projection under one."""
    plan.check()
    tasks: dict[str, Task] = {}
    units = expert_layers(model, every)
    planned = {layer for name in plan.layers for layer in units.get(name, [name])}
    skipped = {name: "not in the plan" for name in every if name not in planned}
    for name, entry in plan.layers.items():
        names = units.get(name, [name])
        if names[0] not in every:
            raise PlanError(f"layer {name!r} of the plan is no linear layer of {type(model).__name__}")
        n, k = weight_nk(every[names[0]]).shape
        if (n * len(names), k) != (entry.out_features, entry.in_features):
            raise PlanError(
                f"layer {name!r}: the plan has {entry.out_features} x {entry.in_features}, the model "
                f"{n * len(names)} x {k}"
            )
        scheme = parse_scheme(entry.scheme)
        if scheme.is_float:
            skipped |= dict.fromkeys(names, f"{scheme.name} by the plan")
            continue
        ranges: Sequence[StaticRange | None] = [None] * len(names)
        if scheme.needs_range:
            ranges = entry.static_ranges or [entry.static_range] * len(names)
        if len(ranges) != len(names):
            raise PlanError(f"layer {name!r}: the plan has {len(ranges)} static ranges, the model {len(names)} experts")
        tasks |= {layer: Task(every[layer], scheme, one) for layer, one in zip(names, ranges, strict=True)}
    split = tied_elsewhere(model, {name: task.module for name, task in tasks.items()})
    for name, other in split.items():
        raise PlanError(
            f"layer {name!r} shares its weight with {other!r}, which the plan does not quantize; treat both alike"
        )
    return tasks, skipped


def add_second_moments(
    tasks: dict[str, Task], moments: Mapping[str, Tensor | Curvature], optional: Container[str]
) -> None:
    """Give each scheme that takes one the second moment of its layer's input; optional layers may have none.

    Raises:
        CalibrationError: a layer has no second moment, or one of another size (named).
    """
    for name, task in tasks.items():
        if task.scheme.takes_second_moments and (name in moments or name not in optional):
            if name not in moments:
                raise _no_moment(name)
            task.moments, task.name = moments, name
            if not getattr(moments, "in_turns", False):  # those run the model
                moment_of(moments, name, task.module)


def moment_of(moments: Mapping[str, Tensor | Curvature], name: str, module: nn.Module) -> Tensor | Curvature:
    """The second moment of a layer's input.

    Raises:
        CalibrationError: there is none, or one of another size.
    """
    if name not in moments:
        raise _no_moment(name)
    moment = moments[name]
    from qcut.numerics.codebook.fitting.curvature import Curvature, as_curvature

    if not isinstance(moment, (Tensor, Curvature)):
        raise DtypeError(
            f"layer {name!r}: its second moment is of type {type(moment).__name__}; allowed: a tensor or a Curvature"
        )
    (n, k), curvature = weight_nk(module).shape, as_curvature(moment)
    of_outputs = "the second moment of the derivatives by its outputs"
    for what, held, size in (("its second moment", curvature.inputs, k), (of_outputs, curvature.outputs, n)):
        if held is not None and held.shape != (size, size):
            raise CalibrationError(f"layer {name!r}: {what} has shape {list(held.shape)}; allowed: {[size, size]}")
    return moment


def _no_moment(name: str) -> CalibrationError:
    return CalibrationError(
        f"layer {name!r}: no second moment; collect_second_moments(model, batches) of this model has one for each"
    )


def check_stacks(tasks: Mapping[str, Task], mixtures: Opened) -> None:
    """Check that the experts of a projection are all quantized under one scheme, or none.

    Raises:
        ConfigError: some only, or under several schemes (the projection and an expert are named).
    """
    for stack, names in mixtures.stacks().items():
        chosen = [name for name in names if name in tasks]
        if chosen and len(chosen) < len(names):
            raise ConfigError(
                f"layer {stack!r}: {len(chosen)} of its {len(names)} experts are to be quantized, such as "
                f"{chosen[0]!r}; all of a projection or none is allowed: {stack + '.*'!r} names them"
            )
        schemes = {tasks[name].scheme.name: name for name in chosen}
        if len(schemes) > 1:
            found = ", ".join(f"{scheme} for {name!r}" for scheme, name in schemes.items())
            raise ConfigError(f"layer {stack!r}: its experts have several schemes: {found}; one is allowed")


def stack_reasons(reasons: Mapping[str, str], mixtures: Opened) -> dict[str, str]:
    """Reasons of layers that stay in float, with one for all experts of a projection."""
    found: dict[str, str] = {}
    for name, reason in reasons.items():
        found.setdefault(mixtures.stack_of(name) or name, reason)
    return found
