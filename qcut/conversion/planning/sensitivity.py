"""Measuring what quantizing layers does to a model's output, or to their own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.common.progress import progress_bar
from qcut.conversion.calibration.calibrate import METHODS, Calibration, Method
from qcut.layers.linear import Linear
from qcut.models.modules import (
    as_given,
    eagerly,
    evaluating,
    float_linear,
    forward,
    input_ids_of,
    model_device,
    output_tensor,
    state_kept,
    to_device,
)
from qcut.schemes import Scheme, StaticRange

Metric = Literal["perplexity", "output error"]

_ROWS = 256
"""Calibration tokens that a layer's own error is measured on."""


@contextmanager
def swapped(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other modules in the places of the named ones, wherever those are registered, for a while."""
    new = {id(model.get_submodule(name)): module for name, module in layers.items()}
    places = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None and id(child) in new
    ]
    try:
        for parent, key, child in places:
            parent._modules[key] = new[id(child)]
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


class Judge:
    """The loss of quantized variants of a model, on fixed batches.

    Where batches are token ids and the model returns logits ``[B, T, V]``, the loss is the relative increase of
    perplexity that the Kullback-Leibler divergence from the float model's next-token distribution foretells:
    ``exp(mean KL(p_float ‖ p_quantized)) - 1``, over all positions that the attention mask keeps. Where the float
    model's probabilities are right on average, the expected increase of the negative log-likelihood *is* that
    divergence; measured as a divergence it needs a hundredth of the text, as the noise of the text itself cancels.
    Elsewhere the loss is ``sum (y - y_float)² / sum y_float²`` of the model's output.

    Args:
        model: the float model, in evaluation mode for each measurement.
        batches: see `qcut.models.modules.forward`.
        progress: show a progress bar.

    Attributes:
        pass_s: seconds that the float model took for the first batch, with the comparison of its output.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], progress: bool) -> None:
        self.model, self.progress = model, progress
        self.batches = batches
        self.metric: Metric = "output error"
        self.tokens = 0
        with evaluating(model), eagerly(), torch.no_grad():
            batch = to_device(batches[0], model_device(model))
            start = time.perf_counter()
            ids, y = input_ids_of(batch), self._output(batch)
            if ids is not None and y.ndim == 3 and y.shape[:2] == ids.shape:
                self.metric = "perplexity"
            self._divergence(y, y, kept_positions(batch, y))
            self.pass_s = time.perf_counter() - start

    def losses(
        self, variants: Sequence[Mapping[str, nn.Module]], what: str, max_batches: int | None = None
    ) -> list[float]:
        """The loss of each variant: the model with some layers replaced. The float model runs once per batch.

        Args:
            variants: replacements by layer name.
            what: for the progress bar.
            max_batches: use the first batches only.
        """
        error = [0.0] * len(variants)
        total, self.tokens = 0.0, 0
        batches = self.batches[:max_batches]
        bar = progress_bar(len(variants) * len(batches), what, "pass", shown=self.progress)
        with evaluating(self.model), eagerly(), torch.no_grad(), bar as advance:
            for batch in batches:
                batch = to_device(batch, model_device(self.model))
                y = self._output(batch)
                keep = kept_positions(batch, y)
                self.tokens += int(keep.sum())
                if self.metric == "output error":
                    total += y[keep].double().square().sum().item()
                for i, variant in enumerate(variants):
                    with swapped(self.model, variant):
                        got = self._output(batch)
                    error[i] += self._divergence(y, got, keep)
                    advance(1)
        if self.metric == "output error":
            return [_or_inf(e / total if total else e) for e in error]
        return [as_loss(e / max(1, self.tokens), self.metric) for e in error]

    def _output(self, batch: Any) -> Tensor:
        with state_kept(self.model):
            return output_tensor(forward(self.model, to_device(batch, model_device(self.model))))

    def _divergence(self, y: Tensor, got: Tensor, keep: Tensor) -> float:
        if self.metric == "output error":
            return (y[keep].double() - got[keep].double()).square().sum().item()
        total = 0.0
        # By sequence: the distributions of a whole batch in float32 would need several times the memory of its logits.
        for a, b, rows in zip(y, got, keep, strict=True):
            p, q = a[rows].float().log_softmax(-1), b[rows].float().log_softmax(-1)
            total += F.kl_div(q, p, reduction="none", log_target=True).sum(-1).double().sum().item()
        return max(0.0, total) if total == total else math.inf


def _or_inf(x: float) -> float:
    return x if math.isfinite(x) else math.inf


def as_loss(added: float, metric: str) -> float:
    """A loss in nats a token, the unit in which losses of layers add up, as `Judge` states it."""
    return added if metric != "perplexity" else math.expm1(added) if added < 700 else math.inf


def as_sum(loss: float, metric: str) -> float:
    """The inverse of `as_loss`."""
    return math.log1p(loss) if metric == "perplexity" else loss


def kept_positions(batch: Any, y: Tensor) -> Tensor:
    """Which positions of the output count: those of the attention mask, if there is one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    shape = y.shape[:-1] if y.ndim > 1 else y.shape
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.to(torch.bool)
    return torch.ones(shape, dtype=torch.bool, device=y.device)


def output_error(module: nn.Module, layer: nn.Module, sample: Tensor) -> float:
    """``‖y - ŷ‖² / ‖y‖²`` of a layer's output on sampled inputs ``[R, K]``, at most 256 of them."""
    x = sample[:_ROWS]
    with torch.no_grad():
        y = float_linear(module, x)
        power = y.double().square().sum().item()
        return _or_inf((layer(as_given(x, module)) - y).double().square().sum().item() / power) if power else 0.0


def best_range(
    module: nn.Module, scheme: str | Scheme, name: str, calibration: Calibration
) -> tuple[StaticRange, Method]:
    """Of the calibrated ranges (minmax, quantile, mse), the one with the least `output_error`; ties to the first.

    Args:
        module: the float layer.
        scheme: one that needs a range.
        name: the layer's in the calibration.
        calibration: holds the ranges and the inputs.
    """
    sample = calibration.stats(name).sample

    def error(method: Method) -> float:
        layer = Linear.from_float(module, scheme, static_range=calibration.range(name, method), name=name)
        return output_error(module, layer, sample)

    best = min(METHODS, key=error)
    return calibration.range(name, best), best
