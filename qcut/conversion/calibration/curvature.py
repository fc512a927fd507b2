"""Curvatures of the loss by the weights of a model's layers: codebooks are fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.observers import run_observed
from qcut.errors import CalibrationError, ConfigError
from qcut.models.modules import first_input, forward, model_device, output_tensor, weight_nk
from qcut.models.selection import DEFAULT_SKIP, find_layers
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.plain_state import in_plain_state

Loss = Literal["tokens", "outputs"]

OUTPUT_LIMIT = 8192
"""Most rows of a layer whose outputs are fitted together: their moment takes 256 MiB."""

_SCALE = 256.0  # of the derivatives, which float16 would lose otherwise; moments are fitted up to a factor


@in_plain_state
def collect_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[str] | None = None,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    loss: Loss | None = None,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Curvature]:
    """Second moments of the inputs of a model's linear layers and of the loss's derivatives by their outputs.

    Each batch is one pass forward and one back. Derivatives are those of a loss that the float model itself expects:
    the labels are drawn from its own distribution, so that batches need none, and the moments of the derivatives are
    the curvature of the model's divergence from itself (the Fisher information).

    A layer of N rows and K columns takes ``4 (K^2 + N^2)`` bytes, 46 GB in all for a Llama of 8 billion parameters:
    ``layers`` takes the layers of a large model in turns.

    Args:
        model: run in evaluation mode; modes and ``requires_grad`` are restored, gradients are left as they are.
        batches: what the model is called on; see `qcut.calibrate`.
        layers: globs of layer names; None takes every ``nn.Linear`` and ``Conv1D``.
        skip: globs of layers to leave out.
        loss: ``tokens``: cross-entropy of labels drawn from the output's softmax, at every position; ``outputs``: the
            squared error of the output tensor (in random directions), for encoders; None takes ``tokens`` where the
            model returns ``logits``, else ``outputs``.
        seed: of the labels and directions, drawn on the CPU.
        progress: show a progress bar.

    Returns:
        `qcut.Curvature` by layer name, on the model's device. Layers of more than 8192 rows have no ``outputs``.

    Raises:
        CalibrationError: no batch, a layer that never ran or that the loss does not depend on, or NaN or Inf in a
            layer's input or derivative.
        ConfigError: another loss, or a model that cannot be differentiated.
        QuantizationError: no layer matches.

    Exactness: float32 sums, in the order of the batches.

    Source: Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature" (2015),
    section 3; Kim et al., "GuidedQuant" (2025), section 3 (inputs weighted by derivatives).
    """
    if loss not in ("tokens", "outputs", None):
        raise ConfigError(f"loss: found {loss!r}; allowed: tokens, outputs or None")
    chosen = find_layers(model, layers, skip)
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.zeros((), device=model_device(model), dtype=torch.float32, requires_grad=True)
    sums = {name: _Sums(name, *weight_nk(module).shape) for name, module in chosen.items()}
    hooks = (
        partial(module.register_forward_hook, _observe(sums[name], anchor), with_kwargs=True)
        for name, module in chosen.items()
    )

    def run(batch: Any) -> None:
        _differentiate(forward(model, batch), loss, generator)
        anchor.grad = None

    with frozen(model), torch.enable_grad():
        count = run_observed(model, batches, hooks, run, "curvature", progress)
    return {name: one.mean(count) for name, one in sums.items()}


class _Sums:
    """Running sums of one layer."""

    def __init__(self, name: str, n: int, k: int) -> None:
        self.name, self.tokens, self.inputs = name, 0, torch.zeros((), dtype=torch.float32, device="cpu")
        self.outputs: Tensor | None = torch.zeros((), dtype=torch.float32, device="cpu") if n <= OUTPUT_LIMIT else None

    @torch.no_grad()
    def add(self, x: Tensor, g: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        g = g.reshape(-1, g.shape[-1]).float()
        product = x.t() @ (x * g.square().sum(1, keepdim=True))
        self.inputs = product if not self.tokens else self.inputs.add_(product)
        if self.outputs is not None:
            self.outputs = g.t() @ g if not self.tokens else self.outputs.addmm_(g.t(), g)
        self.tokens += len(x)

    def mean(self, batches: int) -> Curvature:
        if not self.tokens:
            raise CalibrationError(
                f"layer {self.name!r} saw no derivative of the loss in {batches} batches; pass data that reaches it, "
                f"or leave it out with skip=[{self.name!r}]"
            )
        for moment in (self.inputs, self.outputs):
            if moment is None:
                continue
            if not moment.isfinite().all():
                raise CalibrationError(
                    f"layer {self.name!r}: found NaN or Inf in its input or in the loss's derivative by its output; "
                    "every value must be finite"
                )
            moment /= self.tokens
        return Curvature(self.inputs, self.outputs)


def _observe(sums: _Sums, anchor: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
        x = first_input(args, kwargs).detach()
        # No parameter has a gradient: the first layer's output depends on a zero that has one.
        output = output if output.requires_grad else output + anchor.to(output.dtype)
        output.register_hook(lambda g: sums.add(x, g))
        return output

    return hook


def _differentiate(output: Any, loss: Loss | None, generator: torch.Generator) -> None:
    if loss is None:
        loss = "tokens" if isinstance(getattr(output, "logits", None), Tensor) else "outputs"
    result = output_tensor(output)
    if not result.requires_grad:
        return  # no layer ran, or the output is detached: layers without derivatives are named
    with torch.no_grad():
        if loss == "tokens":
            slope = result.float().softmax(-1)
            drawn = torch.rand(slope.shape[:-1], generator=generator, dtype=torch.float32, device="cpu")
            drawn = drawn.to(slope.device)
            labels = torch.searchsorted(slope.cumsum(-1), drawn[..., None]).clamp_(max=slope.shape[-1] - 1)
            slope.scatter_add_(-1, labels, torch.full_like(drawn, -1.0)[..., None])
        else:
            slope = torch.randn(result.shape, generator=generator, dtype=torch.float32, device="cpu").to(result.device)
        slope *= _SCALE
    try:
        result.backward(slope.to(result.dtype))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(f"the model cannot be differentiated: {error}") from error


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Switch ``requires_grad`` of all parameters off for a while."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
