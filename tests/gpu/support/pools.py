"""A memory pool with allocations where a test expects them."""

from __future__ import annotations

import ctypes
import functools

import torch


@functools.cache
def guard_pool() -> torch.cuda.MemPool:
    """One pool for all tests of a process: a tensor that is freed in it makes room for the next one of its size.

    The pool is never destroyed. torch's destructor of a pool aborts the process now and then.
    """
    pool = torch.cuda.MemPool()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool
