"""Integers of 4 or 8 bits in the words of 32 bits that libraries pack them in."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_words(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The integers of int32 words, the lowest bits first.

    Args:
        packed: int32 ``[A, B]``.
        bits: 4 or 8.
        dim: along which the integers of a word follow one another: 0 or 1.

    Returns:
        uint8 ``[A * 32 / bits, B]`` or ``[A, B * 32 / bits]``.
    """
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = (packed.unsqueeze(dim + 1) >> shifts.view([-1, 1] if dim == 0 else [-1])) & ((1 << bits) - 1)
    shape = [packed.shape[0] * count, packed.shape[1]] if dim == 0 else [packed.shape[0], packed.shape[1] * count]
    return parts.to(torch.uint8).reshape(shape)


def centred(q: Tensor) -> Tensor:
    """int8 of unsigned bytes: ``q - 128``."""
    return (q ^ 0x80).view(torch.int8)
