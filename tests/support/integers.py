"""Layers in integers to test with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qcut.numerics import int16, integers
from qcut.schemes import padded_k


def case(dtype: torch.dtype, m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Tokens, padded weight, bias, multiplier and shift, whose results lie within and beyond the range."""
    g = torch.Generator().manual_seed(seed)
    lo, hi = (-128, 127) if dtype is torch.int8 else (-(2**15), int16.LARGEST)
    q = torch.randint(lo, hi + 1, (m, k), generator=g).to(dtype)
    weight = torch.zeros(n, padded_k(k), dtype=torch.int8)
    weight[:, :k] = torch.randint(-128, 128, (n, k), generator=g)
    spread = hi * 74 * math.sqrt(k)
    bias = (torch.randn(n, generator=g) * spread).long()
    multiplier, shift = integers.fixed_point((torch.rand(n, generator=g).double() + 0.5) * hi / spread)
    return q, weight, bias, multiplier, shift
