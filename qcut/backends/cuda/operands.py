"""Aligned and row-major tensors, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors start at multiples of 16 bytes, as vector loads need them to."""
    for tensor in tensors:  # noqa: SIM110 (all() of a generator takes longer, at every call)
        if tensor is not None and tensor.data_ptr() % 16:
            return False
    return True


def dense(t: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and aligned for vector loads, else a copy."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


class Parameters(NamedTuple):
    """Tensors as kernels read them.

    Attributes:
        tensors: themselves or dense copies, kept until the launch is queued.
        addresses: where they start.
        copied: whether one is a copy, which the kernel queued just before writes.
    """

    tensors: list[Tensor]
    addresses: list[int]
    copied: bool


def parameters(*given: Tensor | None) -> Parameters:
    """Those that are not None, `dense`. One loop, since this is the hot path."""
    tensors, addresses, copied = [], [], False
    for tensor in given:
        if tensor is None:
            continue
        address = tensor.data_ptr()
        if address % 16 or not tensor.is_contiguous():
            tensor, copied = dense(tensor), True
            address = tensor.data_ptr()
        tensors.append(tensor)
        addresses.append(address)
    return Parameters(tensors, addresses, copied)


MOST_TILE_ROWS = 256
"""Most tokens of a tile of an int8 product, with those of the other CTAs of its cluster."""
FEW_TOKENS = 16
"""Up to so many tokens no kernel takes tiles of tokens that it loads by TMA."""


def int8_rows(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors for m int8 tokens of k columns, and for their float32 scales, in memory for whole tiles of tokens.

    TMA takes longer for a row past a tensor's end than for one of data: products read the rows behind these.
    """
    rows = m if m <= FEW_TOKENS else -(-m // MOST_TILE_ROWS) * MOST_TILE_ROWS
    q = torch.empty((rows, k), dtype=torch.int8, device=device)
    return q[:m], torch.empty(rows, dtype=torch.float32, device=device)[:m]


def has_rows(rows: int, *tensors: Tensor) -> bool:
    """Whether contiguous tensors that are not empty lie in memory for so many rows."""
    return all(
        t.untyped_storage().nbytes() >= (t.storage_offset() + rows * (t.numel() // len(t))) * t.element_size()
        for t in tensors
    )


def row_major(x: Tensor) -> tuple[Tensor, int]:
    """x ``[..., K]`` as rows with unit stride along K, copied if no view has it, and the stride between rows."""
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.stride(0)
        x = x.contiguous()
    return x, x.shape[-1]
