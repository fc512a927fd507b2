"""Refines a quantized model as a whole, so that its predictions come nearer to the float model's.

Fitting a layer at a time (`qcut.numerics.codebook.fitting.fit`) knows the loss by two moments only, at the float
weights. Here the
quantized model is differentiated: norms, biases and the vectors of the layers between follow the gradient of the
divergence, and so do the codes: every place of a rotated weight has a real number, in units of its scale, that is
rounded to the nearest codebook value; derivatives pass through that rounding unchanged.

Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons" (2013), section 4 (straight
through); Hinton et al., "Distilling the knowledge in a neural network" (2015), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.common.numbers import SEEDS, check_integer, is_number
from qcut.common.progress import with_progress
from qcut.conversion.calibration.curvature import differentiating, frozen
from qcut.conversion.commit import commit
from qcut.conversion.refined import RefinedLayer, Vectors
from qcut.conversion.report import weight_error
from qcut.conversion.verification import Proof, excerpt
from qcut.errors import CalibrationError, ConfigError, QuantizationError, ShapeError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.embedding import Embedding
from qcut.layers.experts.opening import Opened, opened
from qcut.layers.linear import Linear
from qcut.layers.quantized import quantized_layers
from qcut.models.fusion import Change
from qcut.models.modules import (
    check_batches,
    eagerly,
    evaluating,
    forward,
    is_conv1d,
    is_linear,
    model_device,
    output_tensor,
    state_kept,
    tensor_key,
    to_device,
    weight_nk,
)
from qcut.models.selection import check_model, expert_stacks, globs, matches
from qcut.numerics.codebook.rotation import NO_ROTATION
from qcut.numerics.plain_state import in_plain_state

CODE_RATE = 2e-3
"""Adam's largest rate for numbers that stand for codes, in units of the least distance of two codebook values."""
RATE = 1e-3
"""Adam's largest rate for norms, relative to themselves, and for vectors."""

_WARM_STEPS = 16
_AT_ONCE = 32  # losses that are read at a time: reading one waits for the device
_BETAS = (0.9, 0.98)
_LOSS_SCALE = 4096.0
_EPSILON = 1e-12  # derivatives of a mean over many positions are small


@dataclass(frozen=True)
class Refinement:
    """What `refine` did.

    Attributes:
        losses: of each step's batch, before the step: the mean divergence of a position in nats or, if the output
            has no logits, the squared error relative to the mean square.
        changed: share of all codes that are other ones now.
    """

    losses: tuple[float, ...]
    changed: float

    def __str__(self) -> str:
        tenth = max(1, len(self.losses) // 10)
        first, last = (sum(part) / tenth for part in (self.losses[:tenth], self.losses[-tenth:]))
        steps = f"{len(self.losses)} steps, loss {first:.4g} to {last:.4g}"
        return f"Refinement: {steps}, {self.changed:.1%} of codes changed"


@in_plain_state
def refine(
    model: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    layers: Sequence[str] | None = None,
    rate: float = RATE,
    code_rate: float = CODE_RATE,
    seed: int = 0,
    verify: Any = None,
    progress: bool = True,
) -> Refinement:
    """Tune a quantized model's codebook layers and vectors, in place, to predict what the float model predicts.

    A step of Adam for each batch, at rates that rise over the first steps and fall to zero like a cosine. Tuned are the
    codes and norms of codebook layers (of two passes those of the second), their biases, and the parameters of one
    dimension between them, such as weights of norms. What is stored, how large it is and which kernels run stays as it
    was. Takes about 28 bytes for each code (without codes 12), what training keeps of activations, and both models;
    ``layers`` takes those of a large model in turns.

    Args:
        model: with layers quantized by `qcut.quantize` in rotated codebook schemes, fitted ones best; left as it was
            where this raises.
        reference: the float model, on the same device, with linear layers and embeddings of the same names and sizes.
        batches: what both models are called on, text like that which they will read; see `qcut.calibrate`. Unpadded.
            All are held in memory.
        steps: how many; None takes every batch once. Batches come in a new random order each time all were taken.
        layers: globs of layer names; None takes all codebook layers that are not tied to another, those of experts
            (``*.mlp.experts``) among them. Experts that no token of the batches comes to stay as they are.
        rate: of norms, relative to themselves, and of vectors.
        code_rate: of codes, in units of the least distance of two codebook values; 0 leaves them.
        seed: of the order of batches.
        verify: a batch on which the loss of the refined model may be at most twice that of the model before; None takes
            a short part of the first of ``batches``. As in `qcut.quantize`, each tuned layer is compared with the
            reference's weight and with its own; how layers are connected stays as it was. False verifies nothing.
        progress: show a progress bar.

    Returns:
        A `Refinement`; print it.

    Raises:
        CalibrationError: no batch, or a loss that is NaN or infinite.
        ConfigError: no such layer, a rate or number of steps out of range, a model that cannot be differentiated, or a
            layer or embedding that only one of the two models has (named).
        ShapeError: the outputs of the two models, or the weights of a layer or an embedding (named), differ in shape.
        QuantizationError: a norm grows beyond float16, or the refined model fails ``verify`` (layer named,
            where it is one's).

    Exactness: float32 weights; products and activations in the models' types, without int8 products. Not deterministic
    where torch's derivatives are not.
    """
    check_model(model)
    check_model(reference)
    for what, value in (("rate", rate), ("code_rate", code_rate)):
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigError(f"{what}: found {value!r}; allowed: 0 and more")
    check_integer(seed, "seed", SEEDS)
    check_batches(batches)
    held = list(batches)  # they come in a new order each time
    if not held:
        raise CalibrationError("batches: found none; refinement needs at least one batch")
    steps = len(held) if steps is None else steps
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps: found {steps!r}; allowed: 1 and more")
    with opened(model) as mixtures, opened(reference):
        chosen = _layers(model, layers)
        _check_reference(model, reference)
        return _refined(model, reference, held, steps, chosen, mixtures, rate, code_rate, seed, verify, progress)


def _refined(
    model: nn.Module,
    reference: nn.Module,
    held: list[Any],
    steps: int,
    chosen: dict[str, CodebookLinear],
    mixtures: Opened,
    rate: float,
    code_rate: float,
    seed: int,
    verify: Any,
    progress: bool,
) -> Refinement:
    """See `refine`; the experts of both models are open."""
    device = model_device(model)
    sources = {name: module for name in chosen if is_linear(module := reference.get_submodule(name))}
    floats = {name: weight_nk(module).to(device) for name, module in sources.items()}
    proof = Proof(verify, excerpt(held[0]))
    loss_before = _loss_on(model, reference, proof.batch) if proof.active else math.inf
    tuned = {name: RefinedLayer(layer, floats.get(name), code_rate > 0) for name, layer in chosen.items()}
    vectors = Vectors(model)
    order = _order(len(held), steps, seed)
    losses = _train(model, reference, held, order, tuned, vectors, rate, code_rate, progress)
    results = {name: layer.result(name) for name, layer in tuned.items()}
    changed = total = 0
    changes = [vectors.change()]
    for name, layer in chosen.items():
        *first, last = before = layer.passes
        changed += int((last.indices != results[name].indices).sum())
        total += last.indices.numel()
        after = [*first, results[name]]
        changes.append(Change(partial(layer._set_passes, after, device), partial(layer._set_passes, before, device)))
        if (bias := tuned[name].bias) is not None:
            changes.append(
                Change(partial(setattr, layer, "bias", bias.detach()), partial(setattr, layer, "bias", layer.bias))
            )

    def check() -> None:
        for name in (name for name in chosen if name in sources):
            error = weight_error(floats[name], chosen[name].dequantized_weight())
            proof.layer(name, sources[name], chosen[name], error, fitted=True)
        loss_after = _loss_on(model, reference, proof.batch) if proof.active else 0.0
        if not loss_after <= 2 * loss_before + 1e-6:
            raise QuantizationError(
                f"verify: the loss on a batch is {loss_after:.4g} after refining, and was {loss_before:.4g}; allowed: "
                "twice that. Take lower rates, or more batches"
            )

    for experts, key in _stacks(mixtures, chosen):
        old = mixtures.original[experts]._modules[key]
        put = partial(mixtures.original[experts]._modules.__setitem__, key)
        changes.append(Change(partial(_restack, put, mixtures, experts, key), partial(put, old)))
    commit(changes, check)
    return Refinement(tuple(losses), changed / total)


def _check_reference(model: nn.Module, reference: nn.Module) -> None:
    """Check that two models have linear layers and embeddings of the same names and sizes, experts laid open.

    Raises:
        ConfigError: one has a layer that the other has not.
        ShapeError: the sizes of a layer differ.
    """
    kinds = type(model).__name__, type(reference).__name__
    own, others = _sizes(model), _sizes(reference)
    allowed = "allowed: the float model that was quantized"
    for name in own | others:
        if name not in others:
            raise ConfigError(f"layer {name!r} of the {kinds[0]}: the reference, a {kinds[1]}, has none; {allowed}")
        if name not in own:
            raise ConfigError(f"layer {name!r} of the reference, a {kinds[1]}: the {kinds[0]} has none; {allowed}")
        if own[name] != others[name]:
            raise ShapeError(f"layer {name!r}: the reference has {others[name]}; allowed: {own[name]}")


def _sizes(model: nn.Module) -> dict[str, list[int]]:
    """Of each linear layer and each embedding, quantized or not, the sizes of its weight."""
    found, tables = dict[str, list[int]](), tuple[str, ...]()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Embedding | nn.Embedding):
            found[name] = [module.num_embeddings, module.embedding_dim]
            tables += (f"{name}.",)
        elif isinstance(module, Linear | nn.Linear) and not name.startswith(tables):
            found[name] = [module.out_features, module.in_features]
        elif is_conv1d(module):
            found[name] = list(weight_nk(module).shape)
    return found


def _stacks(mixtures: Opened, chosen: Mapping[str, CodebookLinear]) -> list[tuple[str, str]]:
    """The projections of experts that have tuned layers."""
    found = dict.fromkeys(stack for name in chosen if (stack := mixtures.stack_of(name)) is not None)
    return [(experts, key) for experts, _, key in (stack.rpartition(".") for stack in found)]


def _restack(put: Callable[[nn.Module], None], mixtures: Opened, experts: str, key: str) -> None:
    """Put a stack of a projection's layers as they are now in its place."""
    from qcut.layers.experts.linear_stack import LinearStack  # most models have no experts

    put(LinearStack.of([*getattr(mixtures.experts[experts], key)], f"{experts}.{key}"))


def _train(
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[Any],
    order: Sequence[int],
    tuned: Mapping[str, RefinedLayer],
    vectors: Vectors,
    rate: float,
    code_rate: float,
    progress: bool,
) -> list[float]:
    """Take a step of Adam for each batch in the given order, and return the loss before each step."""
    device = model_device(model)
    by_rate: dict[float, list[Tensor]] = {rate: list(vectors.masters)}
    for one in tuned.values():
        by_rate[rate] += one.scales_and_bias
        if one.numbers is not None:
            by_rate.setdefault(code_rate * one.spacing, []).append(one.numbers)
    rates = list(by_rate)
    optimizer = torch.optim.Adam(
        [{"params": parameters, "lr": largest} for largest, parameters in by_rate.items()], betas=_BETAS, eps=_EPSILON
    )
    half = any(p.dtype is torch.float16 for p in model.parameters())
    # Derivatives of float16 activations are lost below its range: the loss is scaled up, and back if they overflow.
    scaler = torch.amp.GradScaler(device.type, init_scale=_LOSS_SCALE, enabled=half)
    losses: list[float] = []
    pending: list[Tensor] = []
    with (
        evaluating(model),
        evaluating(reference),
        eagerly(),
        frozen(model),
        torch.enable_grad(),
        _computed_by(model, tuned),
    ):
        for step, i in enumerate(with_progress(order, "refine", "step", shown=progress)):
            share = min(1.0, (step + 1) / _WARM_STEPS) * 0.5 * (1 + math.cos(math.pi * step / len(order)))
            for group, largest in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = largest * share
            with torch.no_grad(), state_kept(reference):
                expected = forward(reference, to_device(batches[i], device))
            optimizer.zero_grad()
            with state_kept(model):
                with vectors.in_place():
                    loss = _distance(forward(model, to_device(batches[i], device)), expected)
                if not loss.requires_grad:
                    raise ConfigError(
                        "the model cannot be differentiated: its output depends on no layer that is tuned"
                    )
                with differentiating():
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            pending.append(loss.detach())
            if len(pending) == _AT_ONCE or step + 1 == len(order):
                losses += _finite(pending, order[len(losses) :])
                pending = []
    return losses


@torch.no_grad()
def _loss_on(model: nn.Module, reference: nn.Module, batch: Any) -> float:
    """The loss of a model as it is, in evaluation mode."""
    with evaluating(model), evaluating(reference), eagerly():
        outputs = []
        for one in (model, reference):
            with state_kept(one):
                outputs.append(forward(one, to_device(batch, model_device(model))))
        return _distance(*outputs).item()


def _finite(losses: list[Tensor], batches: Sequence[int]) -> list[float]:
    found: list[float] = torch.stack(losses).tolist()
    for i, loss in zip(batches, found, strict=False):
        if not math.isfinite(loss):
            raise CalibrationError(f"batch {i}: the loss is {loss}; it must be finite")
    return found


def _layers(model: nn.Module, layers: Sequence[str] | None) -> dict[str, CodebookLinear]:
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CodebookLinear) and module.scheme.rotation != NO_ROTATION
    }
    owners: dict[Any, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(norms := getattr(module, "norms", None), Tensor):
            owners.setdefault(tensor_key(norms), []).append(name)
    layers, stacks = None if layers is None else globs(layers, "layers"), expert_stacks(model)
    tied = {name for names in owners.values() if len(names) > 1 for name in names}
    chosen = {
        name: layer
        for name, layer in found.items()
        if name not in tied and (layers is None or matches(name, layers, stacks))
    }
    idle = [one for one in layers or () if not any(matches(name, [one], stacks) for name in chosen)]
    if idle or not chosen:
        among = ", ".join(idle or ["all"])
        raise ConfigError(f"{type(model).__name__}: found no untied layer with rotated codebooks among {among}")
    return chosen


def _order(count: int, steps: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    rounds = [
        torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu") for _ in range(-(-steps // count))
    ]
    order: list[int] = torch.cat(rounds)[:steps].tolist()
    return order


@contextmanager
def _computed_by(model: nn.Module, tuned: Mapping[str, RefinedLayer]) -> Iterator[None]:
    """Let layers compute with the weights that are tuned, and derivatives pass through the other quantized layers."""
    layers = quantized_layers(model)
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


def _distance(output: Any, expected: Any) -> Tensor:
    """Mean divergence of the positions' distributions where outputs are logits, else the relative squared error."""
    found, target = output_tensor(output).float(), output_tensor(expected).float()
    if found.shape != target.shape:
        raise ShapeError(f"the model's output has shape {list(found.shape)}, the reference's {list(target.shape)}")
    if isinstance(getattr(expected, "logits", None), Tensor):
        divergence = F.kl_div(found.log_softmax(-1), target.log_softmax(-1), reduction="sum", log_target=True)
        return divergence / max(1, found[..., 0].numel())
    return (found - target).square().mean() / target.square().mean().clamp_min(1e-30)
