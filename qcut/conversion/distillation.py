"""Tunes the codes and norms of a quantized model so that its predictions come nearer to the float model's.

Fitting a layer at a time (`qcut.codebooks.fit`) knows the loss by two moments only. Here the whole model is
differentiated: every place of a rotated weight has a real number, in units of its scale, whose nearest codebook value
counts; derivatives pass by that rounding unchanged. Numbers and norms follow Adam, and the weights that come out have
the same form, size and kernels as before.

Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons" (2013), section 4 (straight
through); Hinton et al., "Distilling the knowledge in a neural network" (2015), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.codebooks import lloyd_max, rotation
from qcut.codebooks.quantizer import RotatedCodebook, column_scales, dequantize, stored_norms
from qcut.conversion.curvature import frozen
from qcut.errors import CalibrationError, ConfigError, ShapeError
from qcut.layers.base import Linear
from qcut.layers.codebook import CodebookLinear
from qcut.models.modules import evaluating, forward, model_device, output_tensor, tensor_key, to_device, weight_nk
from qcut.models.selection import check_model, linear_layers, matches
from qcut.process.progress import with_progress

RATE = 1e-3
"""Adam's rate: for numbers in units of their scale, and for norms relative to themselves."""

_WARM_STEPS = 8
_BETAS = (0.9, 0.98)
_EDGE = 0.02  # a number starts this share of its interval inside it, since norms have changed since it was rounded
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class Distillation:
    """What `distill` did.

    Attributes:
        losses: of each batch, before the step that it caused: the mean divergence of a position in nats, or the mean
            squared error of an output relative to the mean square.
        changed: share of all codes that are other ones now.
    """

    losses: tuple[float, ...]
    changed: float

    def __str__(self) -> str:
        tenth = max(1, len(self.losses) // 10)
        first, last = (sum(part) / tenth for part in (self.losses[:tenth], self.losses[-tenth:]))
        steps = f"{len(self.losses)} steps, loss {first:.4g} to {last:.4g}"
        return f"Distillation: {steps}, {self.changed:.1%} of codes changed"


def distill(
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[Any],
    *,
    layers: Sequence[str] | None = None,
    rate: float = RATE,
    codes: bool = True,
    progress: bool = True,
) -> Distillation:
    """Tune a quantized model's codebook layers, in place, to predict what the float model predicts.

    One step of Adam for each batch, at a rate that rises over the first steps and falls to zero like a cosine. Of a
    layer with two passes the second is tuned. Takes 16 bytes for each weight that is tuned (4 without codes, for each
    norm 16), and what a step of training keeps of activations.

    Args:
        model: with layers quantized by `qcut.quantize` in rotated codebook schemes; left as it was where this raises.
        reference: the float model, on the same device.
        batches: what both models are called on, text like that which they will read, in the order of the steps; see
            `qcut.calibrate`. Unpadded.
        layers: globs of layer names; None takes all codebook layers that are not tied to another.
        rate: Adam's largest rate.
        codes: tune the codes too, not norms alone.
        progress: show a progress bar.

    Returns:
        A `Distillation`; print it.

    Raises:
        CalibrationError: no batch, or a loss that is NaN or infinite.
        ConfigError: no such layer, a rate that is not positive, or a model that cannot be differentiated.
        ShapeError: the outputs of the two models differ in shape.

    Exactness: float32 weights; products and activations in the models' types, without int8 products.
    """
    check_model(model)
    chosen = _layers(model, layers)
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate: found {rate}; allowed: more than 0")
    if not batches:
        raise CalibrationError("batches: found none; distillation needs at least one batch")
    device = model_device(model)
    tuned = {name: _Tuned(layer, codes) for name, layer in chosen.items()}
    for name, module in linear_layers(reference)[0].items() if codes else ():
        if name in tuned and weight_nk(module).shape == tuned[name].q.indices.shape:
            tuned[name].start_from(weight_nk(module).to(device))
    parameters = [p for one in tuned.values() for p in one.parameters]
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=_BETAS)
    losses: list[float] = []
    with evaluating(model), evaluating(reference), frozen(model), torch.enable_grad(), _computed_by(model, tuned):
        for step, batch in enumerate(with_progress(batches, "distill", "batch", shown=progress)):
            rise = min(1.0, (step + 1) / _WARM_STEPS)
            for group in optimizer.param_groups:
                group["lr"] = rate * rise * 0.5 * (1 + math.cos(math.pi * step / len(batches)))
            batch = to_device(batch, device)
            with torch.no_grad():
                wanted = forward(reference, batch)
            loss = _loss(forward(model, batch), wanted)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise CalibrationError(f"batch {step}: the loss is {losses[-1]}; it must be finite")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    results = {name: one.result(name) for name, one in tuned.items()}
    changed = total = 0
    for name, layer in chosen.items():
        before = layer.passes
        changed += int((before[-1].indices != results[name].indices).sum())
        total += before[-1].indices.numel()
        layer._set_passes([*before[:-1], results[name]], device)
    return Distillation(tuple(losses), changed / total)


def _layers(model: nn.Module, layers: Sequence[str] | None) -> dict[str, CodebookLinear]:
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CodebookLinear) and module.scheme.rotation != rotation.NO_ROTATION
    }
    owners: dict[Any, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(norms := getattr(module, "norms", None), Tensor):
            owners.setdefault(tensor_key(norms), []).append(name)
    tied = {name for names in owners.values() if len(names) > 1 for name in names}
    chosen = {
        name: layer
        for name, layer in found.items()
        if name not in tied and (layers is None or any(matches(name, [glob]) for glob in layers))
    }
    if not chosen:
        among = "all" if layers is None else ", ".join(layers)
        raise ConfigError(f"{type(model).__name__}: found no untied layer with rotated codebooks among {among}")
    return chosen


class _Tuned:
    """One layer's numbers and norms while they are tuned."""

    def __init__(self, layer: CodebookLinear, codes: bool) -> None:
        *before, q = layer.passes
        self.q, self.activation, self.bias = q, layer.activation, layer.bias
        self.fixed = dequantize(before) if before else None
        k = q.indices.shape[1]
        self.columns = column_scales(q.norms, k, q.group_size, q.rotation)
        self.edges = lloyd_max.boundaries(q.values)
        self.parts = rotation.groups(k, q.group_size)
        self.growth = torch.zeros(q.norms.shape, device=q.norms.device, requires_grad=True)
        self.numbers = q.values[q.indices.int()].requires_grad_(True) if codes else None
        self.parameters = [self.growth] if self.numbers is None else [self.growth, self.numbers]

    def start_from(self, weight: Tensor) -> None:
        """Numbers of the float weight, kept within the intervals of the chosen values."""
        assert self.numbers is not None
        q, far = self.q, torch.full((1,), torch.inf, device=weight.device)
        left = weight.float() if self.fixed is None else weight.float() - self.fixed
        rotated = rotation.rotate_groups(left, q.rotation, q.group_size, q.seed)
        divisor = torch.where(self.columns > 0, self.columns, 1.0)
        low, high = torch.cat((-far, self.edges)), torch.cat((self.edges, far))
        inside = _EDGE * self.q.values.diff().min()
        at = q.indices.int()
        with torch.no_grad():
            self.numbers.copy_(torch.clamp(rotated / divisor, (low + inside)[at], (high - inside)[at]))

    def values(self) -> Tensor:
        if self.numbers is None:
            return self.q.values[self.q.indices.int()]
        numbers = self.numbers
        nearest = self.q.values[torch.searchsorted(self.edges, numbers.detach(), out_int32=True)]
        return numbers + (nearest - numbers).detach()

    def weight(self) -> Tensor:
        q = self.q
        values = self.values() * (self.columns * (1 + rotation.per_column(self.growth, self.parts)))
        weight = rotation.rotate_groups_back(values, q.rotation, q.group_size, q.seed)
        return weight if self.fixed is None else weight + self.fixed

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _ACTIVATIONS[self.activation](F.linear(x, self.weight().to(x.dtype), bias))

    @torch.no_grad()
    def result(self, name: str) -> RotatedCodebook:
        q = self.q
        norms = stored_norms((q.norms.float() * (1 + self.growth)).clamp_min(0), q.norms.dtype, name)
        if self.numbers is None:
            return replace(q, norms=norms)
        indices = torch.searchsorted(self.edges, self.numbers.detach(), out_int32=True).to(torch.uint8)
        return replace(q, indices=indices, norms=norms)


@contextmanager
def _computed_by(model: nn.Module, tuned: dict[str, _Tuned]) -> Iterator[None]:
    """Let layers compute with the weights that are tuned, and derivatives pass through the other quantized layers."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    before = {name: layer.input_gradients for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.input_gradients = True
        if name in tuned:
            layer.__dict__["forward"] = tuned[name].product
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.input_gradients = before[name]
            layer.__dict__.pop("forward", None)


def _loss(output: Any, wanted: Any) -> Tensor:
    """Mean divergence of the positions' distributions where outputs are logits, else the relative squared error."""
    found, target = output_tensor(output).float(), output_tensor(wanted).float()
    if found.shape != target.shape:
        raise ShapeError(f"the model's output has shape {list(found.shape)}, the reference's {list(target.shape)}")
    if not found.requires_grad:
        raise ConfigError("the model cannot be differentiated: its output depends on no layer that is tuned")
    if isinstance(getattr(wanted, "logits", None), Tensor):
        divergence = F.kl_div(found.log_softmax(-1), target.log_softmax(-1), reduction="sum", log_target=True)
        return divergence / max(1, found[..., 0].numel())
    return (found - target).square().mean() / target.square().mean().clamp_min(1e-30)
