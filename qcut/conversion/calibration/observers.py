"""Runs calibration batches through a model while hooks observe its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qcut.common.progress import with_progress
from qcut.conversion.calibration.layer_stats import LayerStats
from qcut.errors import CalibrationError
from qcut.models.modules import check_batches, eagerly, evaluating, first_input, model_device, state_kept, to_device
from qcut.numerics.plain_state import outside_modes

Place = Callable[[], RemovableHandle]
"""Registers one hook."""


def input_hooks(layers: Mapping[str, nn.Module], observe: Callable[[str, Tensor], None]) -> Iterator[Place]:
    """Hooks for `run_observed` that call a function with each layer's name and input."""

    def hook(name: str) -> Callable[..., None]:
        def call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            with outside_modes():  # the model's own
                observe(name, first_input(args, kwargs))

        return call

    return (partial(module.register_forward_pre_hook, hook(n), with_kwargs=True) for n, module in layers.items())


def run_observed(
    model: nn.Module,
    batches: Iterable[Any],
    hooks: Iterable[Place],
    run: Callable[[Any], object],
    what: str,
    progress: bool,
) -> int:
    """Run every batch with hooks in place, and remove the hooks afterwards.

    Args:
        model: in evaluation mode meanwhile; each batch finds its state as it was before.
        batches: moved to the model's device, one after the other.
        hooks: each registers one.
        run: is called with each batch.
        what: title of the progress bar.
        progress: show it.

    Returns:
        The number of batches.

    Raises:
        CalibrationError: there is no batch.
        DtypeError: the batches are no iterable, or a single batch.
    """
    check_batches(batches)
    device, count = model_device(model), 0
    handles: list[RemovableHandle] = []
    try:
        handles.extend(place() for place in hooks)
        with evaluating(model), eagerly():
            for batch in with_progress(batches, what, "batch", shown=progress):
                given = to_device(batch, device)
                with state_kept(model, seed=count):
                    run(given)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise CalibrationError("batches: found none; calibration needs at least one batch")
    return count


def all_of(batches: Iterable[Any]) -> list[Any]:
    """All batches, to run them more than once.

    Raises:
        DtypeError: they are no iterable, or a single batch.
    """
    check_batches(batches)
    return list(batches)


class LayerObserver:
    """Running statistics of one layer.

    The sample is exact: every token gets a random key, and the rows with the least keys are kept. Which tokens those
    are depends only on the seed and the number of tokens.
    """

    def __init__(self, name: str, rows: int, columns: int, seed: int) -> None:
        self.name, self.tokens = name, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = torch.full((rows,), torch.inf, dtype=torch.float64, device="cpu")
        self.sample = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
        self.lo, self.hi = (
            torch.full((columns,), torch.inf, dtype=torch.float32, device="cpu"),
            torch.full((columns,), -torch.inf, dtype=torch.float32, device="cpu"),
        )

    def __call__(self, x: Tensor, batch: int) -> None:
        """Takes in tokens ``[..., K]``; the batch's number is for messages.

        Raises:
            CalibrationError: NaN or Inf among them.
        """
        x = x.detach().reshape(-1, x.shape[-1])
        if x.shape[0] == 0:
            return
        lo, hi = (t.float().cpu() for t in x.aminmax(dim=0))
        bad = ~(lo.isfinite() & hi.isfinite())
        if bad.any():
            raise CalibrationError(
                f"layer {self.name!r}: batch {batch}: found NaN or Inf in {int(bad.sum())} of {bad.numel()} input "
                f"channels, first in channel {int(bad.nonzero()[0])}; calibration data must be finite"
            )
        self.lo, self.hi = torch.minimum(self.lo, lo), torch.maximum(self.hi, hi)
        self.tokens += x.shape[0]
        rows = len(self.keys)
        keys = torch.rand(x.shape[0], generator=self.generator, dtype=torch.float64, device="cpu")
        least = torch.cat([self.keys, keys]).argsort()[:rows]
        fresh = least[least >= rows] - rows
        free = torch.ones(rows, dtype=torch.bool, device="cpu")
        free[least[least < rows]] = False
        self.keys[free] = keys[fresh]
        self.sample[free] = x[fresh.to(x.device)].float().cpu()

    def stats(self) -> LayerStats:
        """What has been seen."""
        return LayerStats(self.lo, self.hi, self.sample[self.keys.isfinite()], self.tokens)
