"""The modes of torch in which the engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qcut.numerics.plain_state import outside_modes


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
        with outside_modes():
            yield
