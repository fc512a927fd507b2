"""Random rotations of groups of columns: they leave products alone and make weights look normally distributed.

Both are orthogonal and follow from a seed, the same on every device: they are drawn on the CPU. ``rotate`` applies
``x Pi^T`` to the last dimension, ``rotate_back`` the inverse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from qcut.errors import ConfigError

Kind = Literal["hadamard", "qr"]
KINDS = ("hadamard", "qr")


def groups(k: int, group_size: int) -> list[tuple[int, int]]:
    """(first column, columns) of each group of k columns; the last may be shorter.

    Raises:
        ConfigError: a group size below 1.
    """
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}; allowed: 1 and more")
    return [(first, min(group_size, k - first)) for first in range(0, k, group_size)]


@lru_cache(maxsize=64)
def haar(d: int, seed: int) -> Tensor:
    """float32 ``[d, d]``: a rotation of Haar measure, the Q of a Gaussian matrix with R's diagonal made positive.

    Not to be written to: calls share it.

    Exactness: that of LAPACK's QR in float32; two builds of torch may differ in the last bits.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups" (2007), section 5.
    """
    gaussian = torch.randn(d, d, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


@lru_cache(maxsize=1024)
def signs(d: int, seed: int) -> Tensor:
    """float32 ``[d]`` of +1 and -1. Not to be written to: calls share it."""
    return torch.randint(0, 2, (d,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def walsh_hadamard(x: Tensor) -> Tensor:
    """``x H``, H the Walsh-Hadamard matrix of +1 and -1 in natural (Sylvester) order; in x's dtype.

    Args:
        x: floating point ``[..., d]``, d a power of two.

    Raises:
        ConfigError: d is no power of two.

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


def rotate(x: Tensor, kind: Kind, seed: int) -> Tensor:
    """``x Pi^T`` over the last dimension, in float32 or x's wider dtype.

    Args:
        x: ``[..., d]``, floating point.
        kind: ``hadamard``: ``Pi = H D / sqrt(d)``, D of `signs`, d a power of two; ``qr``: ``Pi`` is `haar`.
        seed: of this group: the layer's plus the group's first column.

    Raises:
        ConfigError: another kind, or a Hadamard group whose size is no power of two.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    d = x.shape[-1]
    _check_kind(kind)
    if kind == "qr":
        return x @ haar(d, seed).to(x).t()
    return walsh_hadamard(x * signs(d, seed).to(x)) * d**-0.5


def rotate_back(x: Tensor, kind: Kind, seed: int) -> Tensor:
    """``x Pi``: the inverse of `rotate`, with its arguments and errors."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    d = x.shape[-1]
    _check_kind(kind)
    if kind == "qr":
        return x @ haar(d, seed).to(x)
    return walsh_hadamard(x) * signs(d, seed).to(x) * d**-0.5


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"rotation {kind!r}; allowed: {', '.join(KINDS)}")
