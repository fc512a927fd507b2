"""`quantize`: replace a model's linear layers by int8 ones, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qcut.calibration import Calibration
from qcut.config import Float, Scheme, StaticRange, parse_scheme
from qcut.errors import ConfigError, PlanError, QuantizationError
from qcut.linear import Linear
from qcut.modules import (
    DEFAULT_SKIP,
    FusedActivation,
    as_given,
    find_layers,
    fusible_activations,
    is_linear,
    matches,
    tensor_key,
    tied_elsewhere,
    weight_nk,
    weight_of,
)
from qcut.numerics import apply_activation, sqnr_db
from qcut.plans import Plan
from qcut.smoothing import Smoothing, migrations_for, norm_updates, rescale, scaled_weight

_ERROR_ROWS = 64
"""Calibration tokens that a layer's output error is measured on."""


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer.

    Attributes:
        name: the layer.
        scheme: its scheme.
        in_features: K.
        out_features: N.
        bytes_before: of its parameters.
        bytes_after: of its buffers; shared ones count in every layer that holds them.
        weight_error: ``‖W − Ŵ‖ / ‖W‖`` (Frobenius).
        output_sqnr_db: signal over quantization noise of its output on calibration tokens, or None without calibration.
        tied_to: the layer whose int8 weight it shares, or None.
    """

    name: str
    scheme: str
    in_features: int
    out_features: int
    bytes_before: int
    bytes_after: int
    weight_error: float
    output_sqnr_db: float | None = None
    tied_to: str | None = None


@dataclass(frozen=True)
class Report:
    """What `quantize` did.

    Attributes:
        layers: the quantized layers, in model order.
        skipped: linear layers left in floating point, with the reason.
        bytes_before: of the model's parameters and buffers, shared ones once.
        bytes_after: the same afterwards.
        smoothing: what was migrated, or None.
    """

    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    bytes_before: int
    bytes_after: int
    smoothing: Smoothing | None = field(default=None, repr=False)

    @property
    def schemes(self) -> dict[str, str]:
        """Scheme by layer name."""
        return {layer.name: layer.scheme for layer in self.layers}

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the smoothing's vectors."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": self.skipped,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "smoothed": [m.norm for m in self.smoothing.migrations] if self.smoothing else [],
        }

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [f"{'layer':<{width}}  {'scheme':<11}  {'N x K':>13}  {'KB':>15}  {'weight err':>10}  output SQNR"]
        for r in self.layers:
            size = f"{r.bytes_before / 1e3:,.0f} -> {r.bytes_after / 1e3:,.0f}"
            sqnr = "" if r.output_sqnr_db is None else f"{r.output_sqnr_db:.1f} dB"
            tied = f"  tied to {r.tied_to}" if r.tied_to else ""
            shape = f"{r.out_features} x {r.in_features}"
            lines.append(
                f"{r.name:<{width}}  {r.scheme:<11}  {shape:>13}  {size:>15}  {r.weight_error:>10.3%}  {sqnr}{tied}"
            )
        lines += [f"{name:<{width}}  left as it is: {reason}" for name, reason in self.skipped.items()]
        ratio = self.bytes_before / max(1, self.bytes_after)
        lines.append(
            f"{len(self.layers)} layers quantized; model {self.bytes_before / 1e6:.2f} -> "
            f"{self.bytes_after / 1e6:.2f} MB ({ratio:.2f}x smaller)"
        )
        return "\n".join(lines)


@dataclass
class _Task:
    """What one layer becomes."""

    module: nn.Module
    scheme: Scheme
    static_range: StaticRange | None
    activation: str = "none"


def quantize(
    model: nn.Module,
    scheme: str | Scheme | Plan = "w8a8",
    *,
    calibration: Calibration | None = None,
    smooth: float | None = None,
    include: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    fuse: bool = True,
    prebuild: Sequence[int] = (64, 512, 4096),
    progress: bool = True,
) -> Report:
    """Replace linear layers (``nn.Linear``, transformers' ``Conv1D``) by `qcut.Linear`, in place.

    All or nothing: every new layer and every changed parameter is made first, then they are put in by assignments
    alone. If anything raises, the model is as it was, its modes and its ties included. The price is memory: until the
    end the float weights and their int8 copy (a quarter to a half more) exist together, on the model's device; with
    ``device`` given, the float weights stay where they are, one layer at a time visits the device, and only the int8
    copy lives there. Afterwards the replaced float weights are freed, unless the caller holds them.

    Tied weights stay tied: layers that share one weight share one ``qweight`` and ``weight_scale``. A layer whose
    weight is also used by something else, such as an embedding, is left as it is and the report says so.

    Args:
        model: any module that holds linear layers.
        scheme: one for all layers (``w8a8``, ``w8a8_static``, ``w8a16``), or a `Plan`.
        calibration: `qcut.calibrate` of this model. ``w8a8_static`` and ``smooth`` need it; with it, the report
            states each layer's output error. It is not changed.
        smooth: SmoothQuant's alpha, to migrate outliers into the weights first; see `qcut.smooth`. Not with a plan,
            whose ranges hold for the model it was made on: call `qcut.smooth` before `qcut.plan`.
        include: globs of layers to quantize; None takes all (of the plan).
        skip: globs of layers to leave in float; None means ``("lm_head",)``, or nothing with a plan. A glob matches
            the whole dotted name or the end of it.
        device: where the model shall be afterwards; None leaves it.
        fuse: let a quantized layer compute the activation that follows it, in float32, before its result is rounded;
            where one is known to follow: see `qcut.modules.fusible_activations`.
        prebuild: token counts (batch times length) whose CUDA kernels are built now, in parallel; others are built
            when they are first met, half a minute each. Of no effect on the CPU.
        progress: show a progress bar.

    Returns:
        A `Report`; print it.

    Raises:
        ConfigError: an unknown scheme, ``fp16`` for the whole model, or calibration missing or contradicting a plan.
        QuantizationError: no layer to quantize, or a weight that cannot be (layer named).
        CalibrationError: a layer was not calibrated, or the calibration is another model's.
        PlanError: the plan names layers or sizes that the model does not have, or splits tied layers.

    Exactness: deterministic, on every device; see `qcut.numerics`.
    """
    if isinstance(scheme, Plan) and smooth is not None:
        raise ConfigError("smooth: not with a plan, whose ranges hold for the model it was made on; smooth, then plan")
    if smooth is not None and calibration is None:
        raise ConfigError(f"smooth={smooth} needs calibration=qcut.calibrate(model, batches)")
    smoothing = None
    if smooth is not None and calibration is not None:
        smoothing = migrations_for(model, calibration, smooth)
        calibration = calibration.copy()
        rescale(calibration, smoothing)
    tasks, skipped = _tasks(model, scheme, calibration, include, skip)
    scales = smoothing.scales if smoothing else {}
    target = None if device is None else torch.device(device)
    before = model_bytes(model)

    for name, task in tasks.items():
        if calibration is not None and name in calibration.layers:
            calibration.check(name, weight_nk(task.module).shape[1])
    fused: dict[str, str] = {}
    for name, (follower, activation) in fusible_activations(model).items() if fuse else ():
        if name in tasks:
            tasks[name].activation = activation
            fused[follower] = activation
    _prebuild(tasks, target, prebuild, progress)
    layers: dict[str, Linear] = {}
    reports = []
    first: dict[tuple[Any, ...], str] = {}
    for name, task in tqdm(tasks.items(), desc="quantize", unit="layer", disable=not progress, leave=False):
        source = _source(task.module, scales.get(name), target)
        layer = Linear.from_float(
            source, task.scheme, activation=task.activation, static_range=task.static_range, name=name
        )
        tied_to = first.setdefault(tensor_key(weight_of(task.module)), name)
        reports.append(_report(name, task, source, layer, calibration, None if tied_to == name else tied_to))
        if tied_to != name:
            _tie(layer, layers[tied_to])
        layers[name] = layer

    updates: list[tuple[nn.Parameter, Tensor]] = []
    for migration in smoothing.migrations if smoothing else ():
        updates += norm_updates(model, migration)
        for name in migration.layers:
            if name not in layers:
                module = model.get_submodule(name)
                updates.append((weight_of(module), scaled_weight(module, migration.scale)))
    swaps: dict[int, nn.Module] = {id(task.module): layers[name] for name, task in tasks.items()}
    _commit(model, swaps, fused, updates, target)
    return Report(tuple(reports), skipped, before, model_bytes(model), smoothing)


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    return sum({tensor_key(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


def _tasks(
    model: nn.Module,
    scheme: str | Scheme | Plan,
    calibration: Calibration | None,
    include: Sequence[str] | None,
    skip: Sequence[str] | None,
) -> tuple[dict[str, _Task], dict[str, str]]:
    """What each layer becomes, and why the others stay."""
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
            raise ConfigError("scheme 'fp16' leaves every layer as it is; use w8a8, w8a8_static or w8a16")
        static = parsed.name == "w8a8_static"
        if static and calibration is None:
            raise ConfigError("scheme 'w8a8_static' needs calibration=qcut.calibrate(model, batches)")
        chosen = find_layers(model, include, DEFAULT_SKIP if skip is None else skip)
        skipped = {}
        elsewhere = tied_elsewhere(model, chosen)
        tasks = {
            name: _Task(module, parsed, calibration.range(name) if static and calibration else None)
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


def _plan_tasks(model: nn.Module, plan: Plan, every: dict[str, nn.Module]) -> dict[str, _Task]:
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
            tasks[name] = _Task(every[name], scheme, entry.static_range if scheme.name == "w8a8_static" else None)
    split = tied_elsewhere(model, {name: task.module for name, task in tasks.items()})
    for name, other in split.items():
        raise PlanError(
            f"layer {name!r} shares its weight with {other!r}, which the plan does not quantize; treat both alike"
        )
    return tasks


def _prebuild(tasks: dict[str, _Task], device: torch.device | None, rows: Sequence[int], progress: bool) -> None:
    """Build the kernels of the layers that will live on a CUDA device, each once."""
    from qcut._launch_plans import Kind, LinearCall, prebuild

    kinds: dict[str, Kind] = {"w8a8": "dynamic", "w8a8_static": "static", "w8a16": "weight_only"}
    calls: dict[int, set[LinearCall]] = {}
    for name, task in tasks.items():
        weight = weight_nk(task.module)
        home = device or weight.device
        if home.type != "cuda":
            continue
        if task.scheme.name == "w8a16" and weight.dtype is torch.float32:
            raise ConfigError(
                f"layer {name!r}: w8a16 computes in float16 or bfloat16 on CUDA, and its weight is float32; "
                "convert the model first (model.half())"
            )
        n, k = weight.shape
        bias = task.module._parameters.get("bias") is not None
        index = home.index if home.index is not None else torch.cuda.current_device()
        calls.setdefault(index, set()).update(
            LinearCall(kinds[task.scheme.name], weight.dtype, m, n, k, bias, task.activation) for m in rows
        )
    for index, wanted in calls.items():
        prebuild(wanted, index, progress)


def _source(module: nn.Module, scale: Tensor | None, device: torch.device | None) -> nn.Module:
    """The layer to quantize: the module itself, or a stand-in with its columns scaled, on the target device."""
    if scale is None and (device is None or device == weight_of(module).device):
        return module
    weight = weight_nk(module)
    weight = weight.to(device or weight.device)
    if scale is not None:
        weight = (weight.float() * scale.to(weight.device)).to(weight.dtype)
    n, k = weight.shape
    bias = module._parameters.get("bias")
    stand_in = nn.Linear(k, n, bias=bias is not None, device="meta").train(module.training)
    stand_in.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        stand_in.bias = nn.Parameter(bias.detach().to(weight.device), requires_grad=False)
    return stand_in


def _tie(layer: Linear, owner: Linear) -> None:
    """Let a layer hold the owner's tensors wherever theirs hold the same values."""
    for name, buffer in owner._buffers.items():
        mine = layer._buffers.get(name)
        if buffer is not None and mine is not None and torch.equal(buffer, mine):
            layer._buffers[name] = buffer


def _report(
    name: str, task: _Task, source: nn.Module, layer: Linear, calibration: Calibration | None, tied_to: str | None
) -> LayerReport:
    weight = weight_nk(source).float()
    norm = weight.double().norm().item()
    error = (layer.dequantized_weight() - weight).double().norm().item() / norm if norm else 0.0
    sqnr = None
    if calibration is not None and name in calibration.layers:
        x = calibration.layers[name].sample[:_ERROR_ROWS].to(weight.device)
        bias = source._parameters.get("bias")
        with torch.no_grad():
            y = nn.functional.linear(x, weight, None if bias is None else bias.float())
            sqnr = sqnr_db(apply_activation(y, task.activation), layer(as_given(x, source)))
    parameters = [p for p in task.module._parameters.values() if p is not None]
    return LayerReport(
        name,
        task.scheme.name,
        layer.in_features,
        layer.out_features,
        sum(p.nbytes for p in parameters),
        layer.weight_bytes,
        error,
        sqnr,
        tied_to,
    )


def _commit(
    model: nn.Module,
    layers: dict[int, nn.Module],
    fused: dict[str, str],
    updates: list[tuple[nn.Parameter, Tensor]],
    device: torch.device | None,
) -> None:
    """Put everything in place, or nothing: tensors that move are copied first, then only references change."""
    replaced = set(layers)
    kept = [module for module in model.modules() if id(module) not in replaced]
    if device is not None:
        changed = {id(p): value for p, value in updates}
        parameters = {id(p): p for module in kept for p in module._parameters.values() if p is not None}
        updates = [(p, changed.get(id(p), p.data).to(device)) for p in parameters.values()]
    buffers = {id(b): b for module in kept for b in module._buffers.values() if b is not None}
    moved = {key: b.to(device) for key, b in buffers.items()} if device is not None else buffers
    undo: list[Callable[[], None]] = []
    try:
        for module in kept:
            for key, child in module._modules.items():
                if id(child) in replaced:
                    undo.append(partial(module._modules.__setitem__, key, child))
                    module._modules[key] = layers[id(child)]
            for key, buffer in module._buffers.items():
                if buffer is not None and moved[id(buffer)] is not buffer:
                    undo.append(partial(module._buffers.__setitem__, key, buffer))
                    module._buffers[key] = moved[id(buffer)]
        for name, activation in fused.items():
            parent, _, key = name.rpartition(".")
            children = model.get_submodule(parent)._modules
            undo.append(partial(children.__setitem__, key, children[key]))
            children[key] = FusedActivation(activation)
        for parameter, value in updates:
            undo.append(partial(setattr, parameter, "data", parameter.data))
            parameter.data = value
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise
