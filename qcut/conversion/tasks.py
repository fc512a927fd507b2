"""What `qcut.quantize` makes of each layer, decided before it begins."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from qcut.config import ALLOWED_SCHEMES, Codebook, Float, Scheme, StaticRange, parse_scheme
from qcut.conversion.calibration import Calibration
from qcut.conversion.plan import Plan
from qcut.errors import CalibrationError, ConfigError, PlanError, QuantizationError
from qcut.models.modules import DEFAULT_SKIP, find_layers, is_linear, matches, tied_elsewhere, weight_nk


@dataclass
class Task:
    """What one layer becomes.

    Attributes:
        module: the layer.
        scheme: its new scheme.
        static_range: of its input, for static activations.
        activation: computed with it.
        second_moment: ``E[x x^T]`` of its input ``[K, K]``, which a codebook is fitted to.
    """

    module: nn.Module
    scheme: Scheme
    static_range: StaticRange | None
    activation: str = "none"
    second_moment: Tensor | None = None


def layer_tasks(
    model: nn.Module,
    scheme: str | Scheme | Plan,
    calibration: Calibration | None,
    include: Sequence[str] | None,
    skip: Sequence[str] | None,
) -> tuple[dict[str, Task], dict[str, str]]:
    """What each layer becomes, and why the others stay; arguments are those of `qcut.quantize`.

    Raises:
        ConfigError: an unknown scheme, ``fp16`` for the whole model, or a calibration that is missing.
        CalibrationError: a layer was not calibrated.
        PlanError: the plan names layers or sizes that the model does not have, or splits tied layers.
        QuantizationError: there is no layer to quantize.
    """
    every = {name: module for name, module in model.named_modules() if name and is_linear(module)}
    if isinstance(scheme, Plan):
        tasks = _plan_tasks(model, scheme, every)
        chosen = find_layers(model, include, skip or ())
        tasks = {name: task for name, task in tasks.items() if name in chosen}
        skipped = {name: "not in the plan" for name in every if name not in scheme.layers}
        skipped |= {name: "fp16 by the plan" for name, s in scheme.schemes.items() if s == Float().name}
    else:
        parsed = parse_scheme(scheme)
        if parsed == Float():
            raise ConfigError(f"scheme 'fp16' leaves every layer as it is; {ALLOWED_SCHEMES}")
        static = parsed.name == "w8a8_static"
        if static and calibration is None:
            raise ConfigError("scheme 'w8a8_static' needs calibration=qcut.calibrate(model, batches)")
        chosen = find_layers(model, include, DEFAULT_SKIP if skip is None else skip)
        skipped = {}
        elsewhere = tied_elsewhere(model, chosen)
        tasks = {
            name: Task(module, parsed, calibration.range(name) if static and calibration else None)
            for name, module in chosen.items()
            if name not in elsewhere
        }
        skipped |= {name: f"its weight is tied to {other!r}" for name, other in elsewhere.items()}
    patterns = DEFAULT_SKIP if skip is None and not isinstance(scheme, Plan) else skip or ()
    for name in every:
        if name not in tasks and name not in skipped:
            skipped[name] = "matched by skip" if matches(name, patterns) else "not in include"
    if not tasks:
        raise QuantizationError(f"{type(model).__name__}: no layer to quantize; left as they are: {skipped}")
    return tasks, skipped


def _plan_tasks(model: nn.Module, plan: Plan, every: dict[str, nn.Module]) -> dict[str, Task]:
    plan.check()
    tasks = {}
    for name, entry in plan.layers.items():
        if name not in every:
            raise PlanError(f"layer {name!r} of the plan is no linear layer of {type(model).__name__}")
        n, k = weight_nk(every[name]).shape
        if (n, k) != (entry.out_features, entry.in_features):
            raise PlanError(
                f"layer {name!r}: the plan has {entry.out_features} x {entry.in_features}, the model {n} x {k}"
            )
        scheme = parse_scheme(entry.scheme)
        if scheme != Float():
            tasks[name] = Task(every[name], scheme, entry.static_range if scheme.name == "w8a8_static" else None)
    split = tied_elsewhere(model, {name: task.module for name, task in tasks.items()})
    for name, other in split.items():
        raise PlanError(
            f"layer {name!r} shares its weight with {other!r}, which the plan does not quantize; treat both alike"
        )
    return tasks


def add_second_moments(tasks: dict[str, Task], moments: Mapping[str, Tensor], optional: Container[str]) -> None:
    """Give each rotated codebook the second moment of its layer's input; the optional ones go without if need be.

    Raises:
        CalibrationError: a layer has none, or one of another size (named).
    """
    for name, task in tasks.items():
        if not isinstance(task.scheme, Codebook) or task.scheme.rotation == "none":
            continue
        moment, k = moments.get(name), weight_nk(task.module).shape[1]
        if moment is not None and moment.shape != (k, k):
            raise CalibrationError(
                f"layer {name!r}: its second moment has shape {list(moment.shape)}; allowed: {[k, k]}"
            )
        if moment is None and name not in optional:
            raise CalibrationError(
                f"layer {name!r}: no second moment; collect_second_moments(model, batches) of this model has one for "
                "each"
            )
        task.second_moment = moment
