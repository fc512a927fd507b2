"""Aligned and row-major tensors, as kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors start at multiples of 16 bytes, as vector loads need them to."""
    for tensor in tensors:  # noqa: SIM110 (all() of a generator takes longer, at every call)
        if tensor is not None and tensor.data_ptr() % 16:
            return False
    return True


def dense(t: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and aligned for vector loads, else a copy."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def row_major(x: Tensor) -> tuple[Tensor, int]:
    """x ``[..., K]`` as rows with unit stride along K, copied where no view has it, and the stride between rows."""
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.stride(0)
        x = x.contiguous()
    return x, x.shape[-1]
