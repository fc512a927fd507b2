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
    rows = (packed.t() if dim == 0 else packed).contiguous().view(torch.uint8)  # words are little-endian
    q = rows if bits == 8 else torch.stack((rows & 15, rows >> 4), -1).flatten(-2)
    return q.t() if dim == 0 else q


def centred(q: Tensor) -> Tensor:
    """int8 of unsigned bytes: ``q - 128``."""
    return (q ^ 0x80).view(torch.int8)
