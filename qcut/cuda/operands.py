"""Tensors as kernels read them."""

from __future__ import annotations

from torch import Tensor


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors start at multiples of 16 bytes, as vector loads need them to."""
    for tensor in tensors:  # noqa: SIM110 (all() of a generator takes longer, at every call)
        if tensor is not None and tensor.data_ptr() % 16:
            return False
    return True
