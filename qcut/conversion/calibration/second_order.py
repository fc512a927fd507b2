"""What errors of layers do to a model's loss, to second order, from one backward pass.

Where a model's probabilities are right, the divergence that a small error ``d`` of a layer's output causes is ``d F d /
2``, F the Fisher information of that output: the expected square of the gradient of the log-likelihood of tokens that
the model itself draws. Of F the diagonal is kept, a number for each output channel, and tokens count as independent.
Gradients with respect to outputs need no gradients of weights: memory is that of one forward pass with its activations.

Source: Martens, "New insights and perspectives on the natural gradient method" (2014), sections 5 and 8; LeCun, Denker,
Solla, "Optimal brain damage" (1989), for the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qcut.common.progress import with_progress
from qcut.conversion.calibration.curvature import differentiating, frozen
from qcut.conversion.planning.sensitivity import Metric, kept_positions
from qcut.errors import CalibrationError
from qcut.models.modules import (
    as_given,
    eagerly,
    evaluating,
    float_linear,
    forward,
    model_device,
    output_tensor,
    state_kept,
    to_device,
)
from qcut.models.selection import expert_layers

_ROWS = 1024
"""Calibration tokens that errors of a layer's output are measured on."""


def channel_weights(
    model: nn.Module, batches: Sequence[Any], layers: Mapping[str, nn.Module], metric: Metric, *, progress: bool = True
) -> dict[str, Tensor]:
    """What a unit of mean squared error of each output channel adds to the model's loss.

    Args:
        model: the float model, in evaluation mode meanwhile. Its parameters get no gradients.
        batches: what the model is called on.
        layers: by name.
        metric: that of `qcut.conversion.planning.sensitivity.Judge`: ``perplexity``, in nats a token, or ``output
            error``.
        progress: show a progress bar.

    Returns:
        float32 ``[N]`` on the model's device, by layer.

    Raises:
        ConfigError: the model cannot be differentiated.
        CalibrationError: gradients are NaN or Inf, or do not reach a layer (named).

    Exactness: float32 sums; one draw for each token, from a fixed seed. The same device gives the same numbers where
    its backward pass is deterministic.
    """
    device = model_device(model)
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, Tensor] = {}
    probes: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., Tensor]:
        def probe(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            zeros = torch.zeros_like(output, requires_grad=True)
            probes.append((name, zeros))
            return output + zeros

        return probe

    handles = [module.register_forward_hook(hook(name)) for name, module in layers.items()]
    total = 0.0
    try:
        with evaluating(model), eagerly(), frozen(model), torch.enable_grad():
            for batch in with_progress(batches, "gradients", "batch", shown=progress):
                batch = to_device(batch, device)
                with state_kept(model), differentiating():
                    y = output_tensor(forward(model, batch))
                    keep = kept_positions(batch, y)
                    score, size = _drawn(y[keep], metric, generator)
                    total += size
                    reached = list(probes)  # checkpoints call layers again in the backward pass
                    gradients = torch.autograd.grad(score, [zeros for _, zeros in reached], allow_unused=True)
                for (name, _), gradient in zip(reached, gradients, strict=True):
                    if gradient is not None:
                        squares = gradient.detach().float().square().reshape(-1, gradient.shape[-1]).sum(0)
                        found[name] = found[name] + squares if name in found else squares
                probes.clear()
    finally:
        for handle in handles:
            handle.remove()
    for names in expert_layers(model, layers).values():
        if seen := [name for name in names if name in found]:
            found = {name: torch.zeros_like(found[seen[0]]) for name in names} | found  # no token came to the others
    for name in layers:
        if name not in found or not bool(found[name].isfinite().all()):
            what = "NaN or Inf" if name in found else "none"
            raise CalibrationError(f"layer {name!r}: its output's gradients: found {what}; finite numbers are needed")
    share = (0.5 if metric == "perplexity" else 1.0) / max(total, 1e-30)
    return {name: found[name] * share for name in layers}


def expected_loss(module: nn.Module, layer: nn.Module, sample: Tensor, weights: Tensor) -> float:
    """``sum_n weights[n] · mean (y[:, n] - ŷ[:, n])²`` on sampled inputs ``[R, K]``, at most 1,024 of them."""
    x = sample[:_ROWS]
    with torch.no_grad():
        y = float_linear(module, x)
        squares = (layer(as_given(x, module)).float() - y).square().mean(0)
        value = (squares.double() * weights.double()).sum().item()
    return value if value == value else float("inf")


def _drawn(y: Tensor, metric: Metric, generator: torch.Generator) -> tuple[Tensor, float]:
    """A number, and what the loss is divided by; the mean square of the number's gradient is the Fisher information."""
    if metric == "output error":
        probe = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32).to(y.dtype)
        return (y * probe).sum(), y.detach().double().square().sum().item()
    logs = y.float().log_softmax(-1)
    drawn = torch.multinomial(logs.detach().exp(), 1, generator=generator)
    return logs.gather(-1, drawn).sum(), float(len(y))
