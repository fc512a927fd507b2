"""The Walsh-Hadamard transform."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.errors import ConfigError


def walsh_hadamard(x: Tensor) -> Tensor:
    """``x H``, H the Walsh-Hadamard matrix of +1 and -1 in natural (Sylvester) order; in x's dtype.

    Args:
        x: floating point ``[..., d]``, d a power of two.

    Raises:
        ConfigError: d is not a power of two.

    Exactness: additions in the order of the fast transform's butterflies, d log2 d of them.
    """
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ConfigError(f"a Hadamard rotation of {d} columns; allowed: powers of two")
    half = 1
    while half < d:
        pairs = x.unflatten(-1, (-1, 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x
