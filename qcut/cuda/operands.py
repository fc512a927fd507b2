"""Tensors as kernels read them."""

from __future__ import annotations

from torch import Tensor


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors start at multiples of 16 bytes, as vector loads need; None does."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
