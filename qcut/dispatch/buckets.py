"""Rounds numbers of tokens, so that nearby batch sizes neither build nor choose a kernel anew."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1 << 12)  # called by every operator
def m_bucket(m: int) -> int:
    """The most tokens that the kernel for m tokens serves: 1, 8, 16, 32, 64, then four steps an octave."""
    if m <= 64:
        return next(size for size in (1, 8, 16, 32, 64) if m <= size)
    step = 1 << ((m - 1).bit_length() - 3)
    return -(-m // step) * step
