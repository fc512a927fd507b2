"""Runs calibration batches through a model while hooks look at its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from qcut.common.progress import with_progress
from qcut.errors import CalibrationError
from qcut.models.modules import check_batches, eagerly, evaluating, model_device, to_device


def run_observed(
    model: nn.Module,
    batches: Iterable[Any],
    hooks: Iterable[Callable[[], RemovableHandle]],
    run: Callable[[Any], object],
    what: str,
    progress: bool,
) -> int:
    """Run every batch with hooks in place, which are gone afterwards.

    Args:
        model: in evaluation mode meanwhile.
        batches: moved to the model's device, one after the other.
        hooks: each places one.
        run: is called with each batch.
        what: title of the progress bar.
        progress: show it.

    Returns:
        The number of batches.

    Raises:
        CalibrationError: there is none.
        DtypeError: what is no iterable of batches.
    """
    check_batches(batches)
    device, count = model_device(model), 0
    handles: list[RemovableHandle] = []
    try:
        handles.extend(place() for place in hooks)
        with evaluating(model), eagerly():
            for batch in with_progress(batches, what, "batch", shown=progress):
                run(to_device(batch, device))
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise CalibrationError("batches: found none; calibration needs at least one batch")
    return count
