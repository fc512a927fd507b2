"""Second moments of what layers read: `qcut.numerics.codebook.fitting.fit` chooses a codebook's indices with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.moments import (
    PRIOR,
    Moments,
    check_seen,
    checked_prior,
    identities,
    shrunk,
    turns_of,
)
from qcut.conversion.calibration.observers import all_of, input_hooks, run_observed
from qcut.errors import CalibrationError
from qcut.layers.experts.opening import opened
from qcut.models.modules import forward, weight_nk
from qcut.models.selection import DEFAULT_SKIP, check_model, expert_layers, expert_module_layers, find_layers
from qcut.numerics.plain_state import in_plain_state


@in_plain_state
def collect_second_moments(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[str] | None = None,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    most_bytes: float | None = None,
    prior: float = PRIOR,
    progress: bool = True,
) -> Moments[Tensor]:
    """``sum x^T x / tokens`` of the inputs of a model's linear layers over real batches.

    Layers that read the same tensor one after the other (q, k, v; gate, up) share one matrix: the same object stands
    under their names. A matrix of K = 14336 takes 0.8 GB: ``most_bytes`` collects those of a large model in turns.

    Experts of a mixture are layers like others, ``mlp.experts.up.17`` and ``mlp.experts.down.17``. The moment of an
    expert is drawn to what is known of all, as far as the expert saw few tokens
    (`qcut.conversion.calibration.moments.shrunk`). They take
    ``4 E (H^2 + I^2)`` bytes a layer: 2.5 GB for 128 experts of H = 2048 and I = 768, and 118 GB for 48 such layers.
    An expert that is a module with layers of its own has its own moment; one without tokens has the identity, by which
    codebooks are fitted to the weights only.

    Args:
        model: run in evaluation mode without gradients; modes, buffers and attributes are restored after each batch.
        batches: what the model is called on; see `qcut.calibrate`. In turns, all are held, and read again in each turn.
        layers: globs of layer names; None takes every ``nn.Linear`` and ``Conv1D``, and experts.
        skip: globs of layers to leave out.
        most_bytes: of matrices that are held at once. The result then runs the model when the moment of a layer is
            asked for and not held; until then the model has to stay as it is now. None: all are collected now.
        prior: of experts: what is known of all counts as so many tokens for each column; 0 takes an expert's own moment
            as it is.
        progress: show a progress bar.

    Returns:
        float32 ``[K, K]`` on the model's device, by layer name; see `Moments`.

    Raises:
        CalibrationError: no batch, a layer that never ran (of experts, all of a projection), NaN or Inf in a layer's
            input, or a layer that reads another's tensor in some calls only.
        ConfigError: ``most_bytes`` or ``prior`` is out of range.
        QuantizationError: no layer matches.

    Exactness: float32 sums, in the order of the batches; in turns the same, except that layers of different turns do
    not share a matrix.
    """
    check_model(model)
    with opened(model):
        sizes = {n: 4 * weight_nk(m).shape[1] ** 2 for n, m in find_layers(model, layers, skip).items()}
        turns = turns_of(sizes, expert_layers(model, sizes), most_bytes)
        held = batches if len(turns) == 1 else all_of(batches)
        return Moments(turns, partial(_collected, model, held, prior=checked_prior(prior), progress=progress))


@torch.no_grad()
@in_plain_state
def _collected(
    model: nn.Module, batches: Iterable[Any], names: Sequence[str], prior: float, progress: bool
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The moments of layers, and the tokens that they saw."""
    with opened(model):
        chosen = {name: model.get_submodule(name) for name in names}
        collector = _Collector()

        def run(batch: Any) -> None:
            forward(model, batch)
            collector.release()

        count = run_observed(model, batches, input_hooks(chosen, collector.add), run, "second moments", progress)
        stacks, modules = expert_layers(model, names), expert_module_layers(model, names)
    tokens = {name: collector.tokens.get(collector.owner.get(name, name), 0) for name in names}
    unseen = check_seen(tokens, stacks, modules, count, "token")
    collector.check()
    found: dict[str, Tensor] = {}
    for stack, members in stacks.items():
        up = stack.endswith(".up")  # whose columns are those of tokens
        means = shrunk([collector.sums.pop(n, None) for n in members], [tokens[n] for n in members], up, prior)
        found |= dict(zip(members, means, strict=True))
    found |= identities({name: weight_nk(chosen[name]) for name in unseen}, 1)
    for owner, total in collector.sums.items():
        total /= collector.tokens[owner]
    return {name: found[name] if name in found else collector.sums[collector.owner[name]] for name in names}, tokens


class _Collector:
    """Running sums of x^T x, one for each group of layers that read the same tensors."""

    def __init__(self) -> None:
        self.owner: dict[str, str] = {}
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, int] = {}
        # The tensor itself, not its id: an id may come back for another tensor.
        self.last: tuple[Tensor, str] | None = None

    def add(self, name: str, x: Tensor) -> None:
        reader = self.last[1] if self.last is not None and self.last[0] is x else name
        owner = self.owner.setdefault(name, reader)
        if owner != name:
            if owner != reader:
                raise CalibrationError(
                    f"layer {name!r} reads the input of {owner!r} in some calls and another tensor in others; collect "
                    f"it by itself with layers=[{name!r}]"
                )
            return
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        product = flat.t() @ flat
        if name in self.sums:
            self.sums[name] += product
        else:
            self.sums[name] = product
        self.tokens[name] = self.tokens.get(name, 0) + len(flat)
        if reader == name:
            self.last = (x, name)

    def release(self) -> None:
        self.last = None

    def check(self) -> None:
        for owner, total in self.sums.items():
            if not total.isfinite().all():
                raise CalibrationError(f"layer {owner!r}: found NaN or Inf in its input; every value must be finite")
