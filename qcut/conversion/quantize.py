"""`quantize`: replace a model's linear layers by quantized ones, all of them or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qcut.common.hooks import notify_quantized
from qcut.common.progress import progress_bar
from qcut.conversion.commit import changes_of, commit
from qcut.conversion.embeddings import classifier_tasks, computing_tables, quantized_table, table_report
from qcut.conversion.inventory import count_parameters, coverage, warn_of_float, warn_of_skip
from qcut.conversion.report import LayerReport, Report, stack_reports, weight_error
from qcut.conversion.tasks import (
    Task,
    add_second_moments,
    check_given,
    check_stacks,
    is_plan,
    layer_tasks,
    quantized_together,
    stack_reasons,
)
from qcut.conversion.verification import Proof
from qcut.errors import ConfigError
from qcut.layers.embedding import Embedding, token_tables
from qcut.layers.experts.opening import Opened, opened, stacked
from qcut.layers.linear import Linear
from qcut.models.fusion import fusible_activations
from qcut.models.modules import (
    as_given,
    device_with_memory,
    float_linear,
    keep_hooks,
    tensor_bytes,
    tensor_key,
    weight_nk,
    weight_of,
)
from qcut.models.selection import DEFAULT_SKIP, check_model, globs, quantized_layers
from qcut.numerics.int8 import apply_activation, sqnr_db
from qcut.numerics.plain_state import in_plain_state
from qcut.schemes import Scheme

if TYPE_CHECKING:
    from qcut.conversion.calibration.calibrate import Calibration
    from qcut.conversion.planning.plan import Plan
    from qcut.conversion.smooth import Smoothing
    from qcut.numerics.codebook.fitting.curvature import Curvature

_ERROR_ROWS = 64
"""Calibration tokens that a layer's output error is measured on."""


@in_plain_state
def quantize(
    model: nn.Module,
    scheme: str | Scheme | Plan = "w8a8",
    *,
    calibration: Calibration | None = None,
    second_moments: Mapping[str, Tensor | Curvature] | None = None,
    smooth: float | None = None,
    include: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    embeddings: str | Scheme | None = None,
    device: torch.device | str | None = None,
    fuse: bool = True,
    allow_growth: bool = False,
    prebuild: Sequence[int] = (64, 512, 4096),
    verify: Any = None,
    progress: bool = True,
) -> Report:
    """Replace linear layers (``nn.Linear``, transformers' ``Conv1D``) by `qcut.Linear`, in place.

    All or nothing: every new layer and every changed parameter is made first; then only assignments put them in. If
    anything raises, the model is as it was, its modes and its ties included. The price is memory: until the end the
    float weights and their quantized copy (an eighth to a half more) exist together, on the model's device; with
    ``device`` given, the float weights stay where they are, one layer at a time visits the device, and only the
    quantized copy lives there. Afterwards the replaced float weights are freed, unless the caller holds them.

    A layer stays in float, and the report gives the reason, if other code reads its weight without calling it
    (``nn.MultiheadAttention``), if it is a subclass with a forward of its own that is not proved to be ``x @ W.T + b``,
    if it is part of an adapter, if its weight is of another dtype than float16, bfloat16 and float32, if its quantized
    form would not be smaller, or if K is beyond the exact range. A codebook gets the rotation ``qr`` where a layer's K
    does not fit its Hadamard rotation. Forward hooks of replaced layers move to the new ones.

    Tied weights stay tied: layers that share one weight share one quantized copy of it. A layer whose weight is also
    used by something else, such as an embedding, is left as it is and reported, unless ``embeddings`` is given: then
    table and classifier share one quantized copy.

    Args:
        model: any module that holds linear layers.
        scheme: one for all layers (``w8a8``, ``w8a8_static``, ``w8a16``, ``codebook4`` and the like, see
            `qcut.Codebook`), or a `Plan`.
        calibration: `qcut.calibrate` of this model. ``w8a8_static`` and ``smooth`` need it; with it, the report
            states each layer's output error. The calibration is not changed.
        second_moments: by name, `qcut.collect_curvature` of this model, or `qcut.collect_second_moments` of the
            layers' inputs: codebook layers are then fitted to them, in place of rounding to the nearest. Other schemes
            ignore them.
        smooth: SmoothQuant's alpha, to migrate outliers into the weights first; see `qcut.smooth`. Not with a plan: its
            ranges hold for the model it was made on; call `qcut.smooth` before `qcut.plan`.
        include: globs of layers to quantize; None takes all (of the plan).
        skip: globs of layers to leave in float; None means ``("lm_head",)``, or nothing with a plan. A glob matches
            the whole dotted name or the end of it; a `QuantizationWarning` says which ones match no layer.
        embeddings: scheme of the tables of tokens (`qcut.layers.embedding.token_tables`), which become
            `qcut.Embedding`, and of the classifier, tied to one or not, whatever ``include`` and ``skip`` are; None
            leaves them as they are otherwise. Tables of positions stay. Those with a forward of their own stay too,
            such as one that scales rows, with what is tied to them; the report gives the reason.
        device: device of the model afterwards; None leaves the model where it is.
        fuse: let a quantized layer compute the activation that follows, in float32, before rounding its result. The
            activations are those of `qcut.models.fusion.fusible_activations`.
        allow_growth: also quantize layers that take as many bytes as before or more: those with few rows or columns. A
            plan, and ``embeddings``, do so in any case.
        prebuild: token counts (batch times length); their CUDA kernels are built now, in parallel; those that take nvcc
            half a minute each are built in the background, unless ``QCUT_BUILD`` is ``wait``, and others serve until
            then. Other kernels are built at their first use. Of no effect on the CPU.
        verify: a batch, as `qcut.calibrate` takes them, on which the quantized and the float model are compared; see
            `qcut.conversion.verification`. None takes a small one that the calibration has seen, if there is one; True
            takes that, or else 16 tokens of the vocabulary if the model is one of transformers that reads token ids,
            and otherwise checks each layer only, which is reported; False leaves verification out. Costs two forward
            passes, and the memory of all layers' results on the batch.
        progress: show a progress bar.

    Returns:
        A `Report`; print it.

    Raises:
        ConfigError: a glob that is no string, an unknown scheme, ``fp16`` for the whole model, calibration missing or
            contradicting a plan, a group that the rotation cannot take, a scheme that tables cannot have, or float32
            weights where kernels take 16-bit tokens (layer named).
        QuantizationError: no layer to quantize, or a weight that cannot be (layer named), or no table of tokens; or
            the quantized model fails ``verify`` (layer named). The model is then as it was.
        UnsupportedError: weights on the meta device, or a table with an option that `qcut.Embedding` has not (named).
        DtypeError: the model is no ``nn.Module``, or a calibration or second moments of another type.
        DeviceError: there is no such device, or it has no memory.
        CalibrationError: a layer was not calibrated or has no second moment, or one of another size.
        PlanError: the plan names layers or sizes that the model does not have, or splits tied layers.
        BuildError: a kernel of ``prebuild`` does not compile.

    Exactness: deterministic. Int8 weights are the same on every device (`qcut.numerics`); an index of a codebook may
    differ where a rotated value lies within rounding of a midpoint (`qcut.numerics.codebook.quantizer.quantize`).

    Source: docs/schemes.md, sections 2 to 4; SmoothQuant, see `qcut.smooth`.
    """
    check_model(model)
    check_given(calibration, second_moments)
    include, skip = (None if g is None else globs(g, what) for g, what in ((include, "include"), (skip, "skip")))
    before, already = model_bytes(model), tuple(quantized_layers(model))
    with opened(model) as mixtures:
        smoothing, calibration = _smoothing(model, scheme, calibration, smooth)
        work = prepare(
            model,
            scheme,
            calibration,
            second_moments,
            smoothing,
            include,
            skip,
            embeddings,
            fuse,
            allow_growth,
            mixtures,
        )
        target = None if device is None else device_with_memory(device)
        on_gpu = {n: t for n, t in work.tasks.items() if (target or weight_of(t.module).device).type == "cuda"}
        if on_gpu:
            from qcut.conversion.prebuild import prebuild_layers  # the CPU needs nothing of the kernel side

            prebuild_layers(on_gpu, target, prebuild, progress)
        proof = Proof(verify, None if calibration is None else calibration.batch)
        proof.record(model, {name: task.module for name, task in work.tasks.items()} | work.tables)

        layers, reports = _make_layers(work.tasks, calibration, target, progress, proof, mixtures)
        tables = _make_tables(work, layers, embeddings, target)
        for name, module in work.tables.items():
            error = weight_error(module.weight, tables[name].dequantized_weight())
            reports.append(table_report(name, tables[name], layers, module.weight.nbytes, error))
        experts = stacked(mixtures, layers, target)
        replaced = {id(task.module) for task in work.tasks.values()} | {id(module) for module in work.tables.values()}
        parameters = count_parameters(model, replaced)
        covered = coverage(model, replaced, work.skipped, DEFAULT_SKIP if skip is None else skip)
        if include is None and not is_plan(scheme):
            warn_of_float(model, covered, stacklevel=4)
        warn_of_skip(model, skip or (), stacklevel=4)
        updates = _float_updates(model, smoothing, layers, mixtures) if smoothing else []

    single = {name: task for name, task in work.tasks.items() if mixtures.stack_of(name) is None}
    replacements: dict[int, nn.Module] = {id(task.module): layers[name] for name, task in single.items()}
    replacements |= {id(module): tables[name] for name, module in work.tables.items()}
    replacements |= {id(mixtures.original[name]): module for name, module in experts.items()}
    changes = changes_of(model, replacements, work.fused, updates, target)
    scales = smoothing.scales if smoothing else {}
    commit(changes, lambda: _check(proof, model, [*layers, *tables], scales))
    notify_quantized(model)
    return Report(
        tuple(stack_reports(reports, mixtures, experts, calibration, second_moments)),
        stack_reasons(work.skipped, mixtures),
        before,
        model_bytes(model),
        parameters,
        already,
        smoothing,
        proof.calls,
        proof.held,
        proof.unseen,
        covered,
    )


def _check(proof: Proof, model: nn.Module, names: Sequence[str], scales: Mapping[str, Tensor]) -> None:
    """Compare the quantized model with the float one, experts of both as layers of their own."""
    with opened(model):
        proof.check(model, {name: model.get_submodule(name) for name in names}, scales)


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    return sum({tensor_key(t): tensor_bytes(t) for t in (*model.parameters(), *model.buffers())}.values())


@dataclass(frozen=True)
class Work:
    """All changes of a model, decided and checked before any layer is made.

    Attributes:
        tasks: tasks of the linear layers, by name.
        skipped: layers that stay in float, with the reason.
        tables: embeddings to quantize, by name.
        fused: activations that layers will compute: function by name.
    """

    tasks: dict[str, Task]
    skipped: dict[str, str]
    tables: dict[str, nn.Embedding]
    fused: dict[str, str]


def _smoothing(
    model: nn.Module, scheme: str | Scheme | Plan, calibration: Calibration | None, alpha: float | None
) -> tuple[Smoothing | None, Calibration | None]:
    """The smoothing to apply, or None, and the calibration of the smoothed model."""
    if alpha is None:
        return None, calibration
    if is_plan(scheme):
        raise ConfigError("smooth: not with a plan: its ranges hold for the model it was made on; smooth, then plan")
    if calibration is None:
        raise ConfigError(f"smooth={alpha} needs calibration=qcut.calibrate(model, batches)")
    from qcut.conversion.smooth import migrations_for, rescale

    smoothing = migrations_for(model, calibration, alpha)
    calibration = calibration.copy()
    rescale(calibration, smoothing)
    return smoothing, calibration


def prepare(
    model: nn.Module,
    scheme: str | Scheme | Plan,
    calibration: Calibration | None,
    second_moments: Mapping[str, Tensor | Curvature] | None,
    smoothing: Smoothing | None,
    include: Sequence[str] | None,
    skip: Sequence[str] | None,
    embeddings: str | Scheme | None,
    fuse: bool,
    allow_growth: bool,
    mixtures: Opened,
) -> Work:
    """Decide what changes; arguments and errors are those of `quantize`, and the model's experts, which are open.

    The model may be on the meta device.
    """
    tasks, skipped = layer_tasks(model, scheme, calibration, include, skip, allow_growth)
    check_stacks(tasks, mixtures)
    skipped |= mixtures.left
    tables = {} if embeddings is None else token_tables(model)
    apart = computing_tables(tables)
    left = [tables.pop(name) for name in apart]
    skipped |= apart
    classifiers = {} if embeddings is None else classifier_tasks(model, tables, embeddings, left)
    tasks |= classifiers
    skipped = {name: reason for name, reason in skipped.items() if name not in classifiers}
    for name, task in tasks.items():
        if calibration is not None and name in calibration.layers:
            calibration.check(name, weight_nk(task.module).shape[1])
    if second_moments is not None:
        add_second_moments(tasks, second_moments, optional=classifiers)
    for name, scale in smoothing.scales.items() if smoothing else ():
        if name in tasks:
            tasks[name].scale = scale
    fused: dict[str, str] = {}
    for name, (follower, activation) in fusible_activations(model).items() if fuse else ():
        if name in tasks:
            tasks[name].activation = activation
            fused[follower] = activation
    return Work(tasks, skipped, tables, fused)


def _make_layers(
    tasks: dict[str, Task],
    calibration: Calibration | None,
    device: torch.device | None,
    progress: bool,
    proof: Proof,
    mixtures: Opened,
) -> tuple[dict[str, Linear], list[LayerReport]]:
    """The quantized layers by name, those of one weight tied, and their reports."""
    layers: dict[str, Linear] = {}
    reports = []
    owners: dict[tuple[Any, ...], str] = {}
    with progress_bar(len(tasks), "quantize", "layer", shown=progress) as advance:
        for group in _made_together(tasks, mixtures, device):
            sources = [_source(task, device) for task in group.values()]
            made = quantized_together(group, sources)
            for (name, task), source, layer in zip(group.items(), sources, made, strict=True):
                owner = owners.setdefault(tensor_key(weight_of(task.module)), name)
                tied_to = None if owner == name else owner
                reports.append(_report(name, task, source, layer, calibration, tied_to))
                x = proof.sample(name)
                x = x if x is None or task.scale is None else x / task.scale.to(x.device)
                proof.layer(name, source, layer, reports[-1].weight_error, task.is_fitted, x)
                if tied_to is not None:
                    layer.tie_to(layers[tied_to])
                keep_hooks(task.module, layer)
                layers[name] = layer
                advance(1)
    return layers, reports


def _made_together(
    tasks: Mapping[str, Task], mixtures: Opened, device: torch.device | None
) -> Iterator[dict[str, Task]]:
    """Tasks that are done at once: fitted experts of a projection, as many as memory allows; others one by one."""
    for stack, members in groupby(tasks, lambda name: tasks[name].is_fitted and mixtures.stack_of(name)):
        names, count = list(members), 1
        if stack:
            from qcut.numerics.codebook.fitting.fit import experts_at_once  # a dense model needs none

            weight = weight_nk(tasks[names[0]].module)
            n, k = weight.shape
            count = experts_at_once(n, k, device or weight.device)
        for first in range(0, len(names), count):
            yield {name: tasks[name] for name in names[first : first + count]}


def _make_tables(
    work: Work, layers: dict[str, Linear], scheme: str | Scheme | None, device: torch.device | None
) -> dict[str, Embedding]:
    """The quantized embeddings by name, tied to the first layer that has their weight."""
    owners: dict[tuple[Any, ...], Linear] = {}
    for name, task in work.tasks.items():
        owners.setdefault(tensor_key(weight_of(task.module)), layers[name])
    return {name: quantized_table(name, module, scheme, owners, device) for name, module in work.tables.items()}


def _float_updates(
    model: nn.Module, smoothing: Smoothing, layers: Mapping[str, Linear], mixtures: Opened
) -> list[tuple[nn.Parameter, Tensor]]:
    """New values that smoothing gives to norms and to layers that stay in float."""
    from qcut.conversion.smooth import float_updates

    return [update for one in smoothing.migrations for update in float_updates(model, one, layers, mixtures)]


def _source(task: Task, device: torch.device | None) -> nn.Module:
    """The layer to quantize: the module itself, or a copy with its columns scaled, on the target device."""
    module, scale = task.module, task.scale
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
    error = weight_error(weight_nk(source).float(), layer.dequantized_weight())
    sqnr = None
    if calibration is not None and name in calibration.layers:
        x = calibration.layers[name].sample[:_ERROR_ROWS]
        with torch.no_grad():
            y = apply_activation(float_linear(source, x), task.activation)
            sqnr = sqnr_db(y, layer(as_given(x, source)))
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
        task.note,
        weight_nk(source).detach().float().norm().item(),
    )
