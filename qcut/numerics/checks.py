"""Which values tensors may hold: what is found where, for messages, or nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def out_of_range(t: Tensor, least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> str | None:
    """The first value of a tensor that is NaN, Inf or outside a range, such as ``nan at [3, 7]``.

    Args:
        t: of any dtype, on any device; nothing of its size is made while all values are allowed.
        least: allowed, and
        most: allowed.
        above: ``least`` itself is not allowed.

    Returns:
        The value and its place, or None if all values are allowed.
    """
    if t.numel() == 0 or t.is_meta:
        return None
    if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool):
        t = t.float()
    if t.is_complex():
        t = torch.view_as_real(t)
    low, high = (float(v) for v in t.aminmax())  # NaN where a value is
    if math.isfinite(low) and math.isfinite(high) and (low > least if above else low >= least) and high <= most:
        return None
    bad = ~(t.isfinite() & ((t > least) if above else (t >= least)) & (t <= most))
    place = bad.nonzero()[0].tolist()
    return f"{t[tuple(place)].item()} at {place}"


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same values.

    Of 8-bit floats, which torch does not compare on the CPU, bits are compared.
    """
    if a.dtype is not b.dtype:
        return False
    eight = a.is_floating_point() and a.element_size() == 1
    return torch.equal(a.view(torch.int8), b.view(torch.int8)) if eight else torch.equal(a, b)


def first_difference(found: Tensor, expected: Tensor) -> str | None:
    """The first place where two tensors of one shape differ, such as ``3 at [7], 5 is needed``; None if none is."""
    if torch.equal(found, expected):
        return None
    place = (found != expected).nonzero()[0].tolist()
    return f"{found[tuple(place)].item()} at {place}, {expected[tuple(place)].item()} is needed"
