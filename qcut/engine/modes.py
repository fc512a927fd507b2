"""The modes of torch in which the engine computes, whatever those of its callers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def inference() -> Iterator[None]:
    """Without gradients, and outside of the callers' modes; around a block, or as a decorator.

    Autocast would give results other dtypes than the cache's, and tensors of inference mode could not be written by the
    next call, which may come from outside or from another thread.
    """
    with torch.no_grad():
        casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if not (casts or torch.is_inference_mode_enabled()):
            yield
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
