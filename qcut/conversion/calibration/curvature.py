"""Curvatures of the loss by the weights of a model's layers: codebooks are fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qcut.common.numbers import SEEDS, check_integer
from qcut.conversion.calibration.moments import (
    PRIOR,
    Moments,
    check_seen,
    checked_prior,
    identities,
    shrunk,
    turns_of,
)
from qcut.conversion.calibration.observers import all_of, run_observed
from qcut.errors import CalibrationError, ConfigError, QcutError
from qcut.layers.experts.opening import opened
from qcut.models.modules import first_input, forward, model_device, output_tensor, weight_nk
from qcut.models.selection import DEFAULT_SKIP, check_model, expert_layers, expert_module_layers, find_layers
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.plain_state import in_plain_state

Loss = Literal["tokens", "outputs"]

OUTPUT_LIMIT = 8192
"""Most rows of a layer with outputs that are fitted together: their moment takes 256 MiB."""

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
    most_bytes: float | None = None,
    prior: float = PRIOR,
    progress: bool = True,
) -> Moments[Curvature]:
    """Second moments of the inputs of a model's linear layers and of the loss's derivatives by their outputs.

    Each batch is one pass forward and one back. Derivatives are those of a loss that the float model itself expects:
    the labels are drawn from its own distribution, so that batches need none, and the moments of the derivatives are
    the curvature of the model's divergence from itself (the Fisher information).

    A layer of N rows and K columns takes ``4 (K^2 + N^2)`` bytes, 46 GB in all for a Llama of 8 billion parameters:
    ``most_bytes`` collects those of a large model in turns.

    Experts of a mixture are layers like others; see `qcut.collect_second_moments` for those of few tokens. A mixture of
    128 experts with 2048 columns and twice 768 rows takes 5.9 GB a layer, 281 GB for 48 layers: with
    ``most_bytes=8e9``, each layer is a turn, and the batches are run 48 times.

    Args:
        model: run in evaluation mode; modes, ``requires_grad``, buffers and attributes are restored, gradients are left
            as they are.
        batches: what the model is called on; see `qcut.calibrate`. In turns, all are held, and read again in each turn.
        layers: globs of layer names; None takes every ``nn.Linear`` and ``Conv1D``, and experts.
        skip: globs of layers to leave out.
        loss: ``tokens``: cross-entropy of labels drawn from the output's softmax, at every position; ``outputs``: the
            squared error of the output tensor (in random directions), for encoders; None takes ``tokens`` where the
            model returns ``logits``, else ``outputs``.
        seed: of the labels and directions, drawn on the CPU; in each turn they are the same.
        most_bytes: of matrices that are held at once; see `qcut.collect_second_moments`.
        prior: of experts; see `qcut.collect_second_moments`.
        progress: show a progress bar.

    Returns:
        `qcut.Curvature` by layer name, on the model's device; see `Moments`. Layers of more than 8192 rows have no
        ``outputs``.

    Raises:
        CalibrationError: no batch, a layer that never ran or that the loss does not depend on (of experts, all of a
            projection), or NaN or Inf in a layer's input or derivative.
        ConfigError: another loss, ``most_bytes`` or ``prior`` out of range, or a model that cannot be differentiated.
        QuantizationError: no layer matches.

    Exactness: float32 sums, in the order of the batches.

    Source: Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature" (2015),
    section 3; Kim et al., "GuidedQuant" (2025), section 3 (inputs weighted by derivatives).
    """
    if loss not in ("tokens", "outputs", None):
        raise ConfigError(f"loss: found {loss!r}; allowed: tokens, outputs or None")
    check_integer(seed, "seed", SEEDS)
    check_model(model)
    with opened(model):
        sizes = {name: _bytes(*weight_nk(module).shape) for name, module in find_layers(model, layers, skip).items()}
        turns = turns_of(sizes, expert_layers(model, sizes), most_bytes)
        held = batches if len(turns) == 1 else all_of(batches)
        return Moments(
            turns, partial(_collected, model, held, loss=loss, seed=seed, prior=checked_prior(prior), progress=progress)
        )


def _bytes(n: int, k: int) -> int:
    return 4 * (k * k + (n * n if n <= OUTPUT_LIMIT else 0))


@in_plain_state
def _collected(
    model: nn.Module,
    batches: Iterable[Any],
    names: Sequence[str],
    loss: Loss | None,
    seed: int,
    prior: float,
    progress: bool,
) -> tuple[dict[str, Curvature], dict[str, int]]:
    """The curvatures of layers, and how many tokens there were derivatives of."""
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.zeros((), device=model_device(model), dtype=torch.float32, requires_grad=True)

    def run(batch: Any) -> None:
        _differentiate(forward(model, batch), loss, generator)
        anchor.grad = None

    with opened(model):
        chosen = {name: model.get_submodule(name) for name in names}
        sums = {name: _Sums(name, len(weight_nk(module))) for name, module in chosen.items()}
        hooks = (
            partial(module.register_forward_hook, _observe(sums[name], anchor), with_kwargs=True)
            for name, module in chosen.items()
        )
        with frozen(model), torch.enable_grad():
            count = run_observed(model, batches, hooks, run, "curvature", progress)
        stacks, modules = expert_layers(model, names), expert_module_layers(model, names)
    tokens = {name: one.tokens for name, one in sums.items()}
    unseen = check_seen(tokens, stacks, modules, count, "derivative of the loss")
    for one in sums.values():
        one.check()
    found: dict[str, Curvature] = {}
    for stack, members in stacks.items():
        counts, up = [tokens[name] for name in members], stack.endswith(".up")
        # Tokens go into up and come out of down; between the two, each expert has channels of its own.
        inputs = shrunk([sums[name].inputs for name in members], counts, up, prior)
        outputs: Sequence[Tensor | None] = [sums[name].outputs for name in members]
        if any(one is not None for one in outputs):
            outputs = shrunk(outputs, counts, not up, prior)
        found |= {name: Curvature(h, g) for name, h, g in zip(members, inputs, outputs, strict=True)}
    weights = {name: weight_nk(chosen[name]) for name in unseen}
    outs = identities({name: weight for name, weight in weights.items() if sums[name].both}, 0)
    found |= {name: Curvature(h, outs.get(name)) for name, h in identities(weights, 1).items()}
    return {name: found[name] if name in found else sums[name].mean() for name in names}, tokens


class _Sums:
    """Running sums of one layer of N rows; none if it saw nothing."""

    def __init__(self, name: str, n: int) -> None:
        self.name, self.tokens, self.both = name, 0, n <= OUTPUT_LIMIT
        self.inputs: Tensor | None = None
        self.outputs: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor, g: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        g = g.reshape(-1, g.shape[-1]).float()
        product = x.t() @ (x * g.square().sum(1, keepdim=True))
        self.inputs = product if self.inputs is None else self.inputs.add_(product)
        if self.both:
            self.outputs = g.t() @ g if self.outputs is None else self.outputs.addmm_(g.t(), g)
        self.tokens += len(x)

    def check(self) -> None:
        for moment in (self.inputs, self.outputs):
            if moment is not None and not moment.isfinite().all():
                raise CalibrationError(
                    f"layer {self.name!r}: found NaN or Inf in its input or in the loss's derivative by its output; "
                    "every value must be finite"
                )

    def mean(self) -> Curvature:
        for moment in (self.inputs, self.outputs):
            if moment is not None:
                moment /= self.tokens
        assert self.inputs is not None
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
    with differentiating():
        result.backward(slope.to(result.dtype))


@contextmanager
def differentiating() -> Iterator[None]:
    """Raise `ConfigError` for what torch raises about a backward pass."""
    try:
        yield
    except (QcutError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise ConfigError(f"the model cannot be differentiated: {error}") from error


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Switch ``requires_grad`` of all parameters off for a while.

    Raises:
        ConfigError: a parameter was made under ``torch.inference_mode`` (named).
    """
    inference = next((name for name, p in model.named_parameters() if p.is_inference()), None)
    if inference is not None:
        raise ConfigError(
            f"parameter {inference!r} was made under torch.inference_mode, and nothing can be differentiated by way of "
            "it; allowed: a model made outside of that mode"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
