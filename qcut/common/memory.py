"""Memory that the allocator holds back."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; None in a process of another C library."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return trim


def return_free_memory() -> None:
    """Give the system back what the C library's allocator has free, wherever it lies; a millisecond or so.

    Large tensors that come and go between small ones that stay leave holes in the heap, which may come to as much as
    all that went.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
