"""Second moments of what layers read: `qcut.numerics.codebook.fitting.fit` chooses a codebook's indices with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.observers import input_hooks, run_observed
from qcut.errors import CalibrationError
from qcut.models.modules import forward
from qcut.models.selection import DEFAULT_SKIP, find_layers
from qcut.numerics.plain_state import in_plain_state


@torch.no_grad()
@in_plain_state
def collect_second_moments(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[str] | None = None,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    progress: bool = True,
) -> dict[str, Tensor]:
    """``sum x^T x / tokens`` of the inputs of a model's linear layers over real batches.

    Layers that read the same tensor one after the other (q, k, v; gate, up) share one matrix: the same object stands
    under their names. A matrix of K = 14336 takes 0.8 GB: ``layers`` takes the layers of a large model in turns.

    Args:
        model: run in evaluation mode without gradients; modes are restored.
        batches: what the model is called on; see `qcut.calibrate`.
        layers: globs of layer names; None takes every ``nn.Linear`` and ``Conv1D``.
        skip: globs of layers to leave out.
        progress: show a progress bar.

    Returns:
        float32 ``[K, K]`` on the model's device, by layer name.

    Raises:
        CalibrationError: no batch, a layer that never ran, NaN or Inf in a layer's input, or a layer that reads
            another's tensor in some calls only.
        QuantizationError: no layer matches.

    Exactness: float32 sums, in the order of the batches.
    """
    chosen = find_layers(model, layers, skip)
    collector = _Collector()

    def run(batch: Any) -> None:
        forward(model, batch)
        collector.release()

    count = run_observed(model, batches, input_hooks(chosen, collector.add), run, "second moments", progress)
    for name in chosen:
        if not collector.tokens.get(collector.owner.get(name, "")):
            raise CalibrationError(
                f"layer {name!r} saw no token in {count} batches; pass data that reaches it, or leave it out with "
                f"skip=[{name!r}]"
            )
    return collector.means(chosen)


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

    def means(self, names: Iterable[str]) -> dict[str, Tensor]:
        for owner, total in self.sums.items():
            if not total.isfinite().all():
                raise CalibrationError(f"layer {owner!r}: found NaN or Inf in its input; every value must be finite")
            total /= self.tokens[owner]
        return {name: self.sums[self.owner[name]] for name in names}
