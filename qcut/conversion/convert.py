"""`quantize`: replace a model's linear layers by quantized ones, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qcut.config import Scheme
from qcut.conversion.calibration import Calibration
from qcut.conversion.plan import Plan
from qcut.conversion.prebuild import prebuild_layers
from qcut.conversion.report import LayerReport, Report
from qcut.conversion.smoothing import migrations_for, norm_updates, rescale, scaled_weight
from qcut.conversion.tables import classifier_tasks, quantized_table, table_report
from qcut.conversion.tasks import Task, add_second_moments, layer_tasks
from qcut.errors import ConfigError
from qcut.layers.base import Linear
from qcut.layers.embedding import token_tables
from qcut.models.modules import FusedActivation, as_given, fusible_activations, tensor_key, weight_nk, weight_of
from qcut.numerics.int8 import apply_activation, sqnr_db

_ERROR_ROWS = 64
"""Calibration tokens that a layer's output error is measured on."""


def quantize(
    model: nn.Module,
    scheme: str | Scheme | Plan = "w8a8",
    *,
    calibration: Calibration | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
    smooth: float | None = None,
    include: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    embeddings: str | Scheme | None = None,
    device: torch.device | str | None = None,
    fuse: bool = True,
    prebuild: Sequence[int] = (64, 512, 4096),
    progress: bool = True,
) -> Report:
    """Replace linear layers (``nn.Linear``, transformers' ``Conv1D``) by `qcut.Linear`, in place.

    All or nothing: every new layer and every changed parameter is made first, then they are put in by assignments
    alone. If anything raises, the model is as it was, its modes and its ties included. The price is memory: until the
    end the float weights and their quantized copy (an eighth to a half more) exist together, on the model's device;
    with ``device`` given, the float weights stay where they are, one layer at a time visits the device, and only the
    quantized copy lives there. Afterwards the replaced float weights are freed, unless the caller holds them.

    Tied weights stay tied: layers that share one weight share one quantized copy of it. A layer whose weight is also
    used by something else, such as an embedding, is left as it is and the report says so, unless ``embeddings`` is
    given: then table and classifier share one quantized copy.

    Args:
        model: any module that holds linear layers.
        scheme: one for all layers (``w8a8``, ``w8a8_static``, ``w8a16``, ``codebook4`` and the like, see
            `qcut.Codebook`), or a `Plan`.
        calibration: `qcut.calibrate` of this model. ``w8a8_static`` and ``smooth`` need it; with it, the report
            states each layer's output error. It is not changed.
        second_moments: of the layers' inputs by name, `qcut.collect_second_moments` of this model: codebook layers
            are then fitted to them, in place of rounding to the nearest. Other schemes do not look at it.
        smooth: SmoothQuant's alpha, to migrate outliers into the weights first; see `qcut.smooth`. Not with a plan,
            whose ranges hold for the model it was made on: call `qcut.smooth` before `qcut.plan`.
        include: globs of layers to quantize; None takes all (of the plan).
        skip: globs of layers to leave in float; None means ``("lm_head",)``, or nothing with a plan. A glob matches
            the whole dotted name or the end of it.
        embeddings: scheme of the tables of tokens (`qcut.layers.embedding.token_tables`), which become
            `qcut.Embedding`, and of the classifier, tied to one or not, whatever ``include`` and ``skip`` say; None
            leaves them as they are otherwise. Tables of positions stay.
        device: where the model shall be afterwards; None leaves it.
        fuse: let a quantized layer compute the activation that follows it, in float32, before its result is rounded;
            where one is known to follow: see `qcut.models.modules.fusible_activations`.
        prebuild: token counts (batch times length) whose CUDA kernels are built now, in parallel; others are built
            when they are first met, half a minute each. Of no effect on the CPU.
        progress: show a progress bar.

    Returns:
        A `Report`; print it.

    Raises:
        ConfigError: an unknown scheme, ``fp16`` for the whole model, calibration missing or contradicting a plan, a
            group that the rotation cannot take, a scheme that tables cannot have, or float32 weights where kernels
            take 16-bit tokens (layer named).
        QuantizationError: no layer to quantize, or a weight that cannot be (layer named), or no table of tokens.
        UnsupportedError: weights on the meta device, or a table with a forward or an option that `qcut.Embedding` has
            not (named).
        DtypeError: a weight of another dtype than float16, bfloat16, float32 and float64 (layer named).
        CalibrationError: a layer was not calibrated or has no second moment, or one of another size.
        PlanError: the plan names layers or sizes that the model does not have, or splits tied layers.
        BuildError: a kernel of ``prebuild`` does not compile.

    Exactness: deterministic. Int8 weights are the same on every device (`qcut.numerics`); an index of a codebook may
    differ where a rotated value lies within rounding of a midpoint (`qcut.codebooks.quantizer.quantize`).

    Source: schemes.md, sections 2 to 4; SmoothQuant, see `qcut.smooth`.
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
    tasks, skipped = layer_tasks(model, scheme, calibration, include, skip)
    tables = {} if embeddings is None else token_tables(model)
    classifiers = {} if embeddings is None else classifier_tasks(model, tables, embeddings)
    tasks |= classifiers
    skipped = {name: reason for name, reason in skipped.items() if name not in classifiers}
    scales = smoothing.scales if smoothing else {}
    target = None if device is None else torch.device(device)
    before = model_bytes(model)

    for name, task in tasks.items():
        if calibration is not None and name in calibration.layers:
            calibration.check(name, weight_nk(task.module).shape[1])
    if second_moments is not None:
        add_second_moments(tasks, second_moments, optional=classifiers)
    fused: dict[str, str] = {}
    for name, (follower, activation) in fusible_activations(model).items() if fuse else ():
        if name in tasks:
            tasks[name].activation = activation
            fused[follower] = activation
    prebuild_layers(tasks, target, prebuild, progress)
    layers: dict[str, Linear] = {}
    reports = []
    first: dict[tuple[Any, ...], str] = {}
    for name, task in tqdm(tasks.items(), desc="quantize", unit="layer", disable=not progress, leave=False):
        source = _source(task.module, scales.get(name), target)
        moment = task.second_moment
        if moment is not None and name in scales:
            inverse = 1 / scales[name].to(moment.device, moment.dtype)
            moment = moment * inverse[:, None] * inverse
        layer = Linear.from_float(
            source,
            task.scheme,
            activation=task.activation,
            static_range=task.static_range,
            second_moment=moment,
            name=name,
        )
        tied_to = first.setdefault(tensor_key(weight_of(task.module)), name)
        reports.append(_report(name, task, source, layer, calibration, None if tied_to == name else tied_to))
        if tied_to != name:
            layer.tie_to(layers[tied_to])
        layers[name] = layer

    owners = {key: layers[name] for key, name in first.items()}
    made = {name: quantized_table(name, module, embeddings, owners, target) for name, module in tables.items()}
    reports += [table_report(name, module, made[name], layers) for name, module in tables.items()]

    updates: list[tuple[nn.Parameter, Tensor]] = []
    for migration in smoothing.migrations if smoothing else ():
        updates += norm_updates(model, migration)
        for name in migration.layers:
            if name not in layers:
                module = model.get_submodule(name)
                updates.append((weight_of(module), scaled_weight(module, migration.scale)))
    swaps: dict[int, nn.Module] = {id(task.module): layers[name] for name, task in tasks.items()}
    swaps |= {id(module): made[name] for name, module in tables.items()}
    _commit(model, swaps, fused, updates, target)
    return Report(tuple(reports), skipped, before, model_bytes(model), smoothing)


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    return sum({tensor_key(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


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


def _report(
    name: str, task: Task, source: nn.Module, layer: Linear, calibration: Calibration | None, tied_to: str | None
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
