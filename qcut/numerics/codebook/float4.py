"""4-bit floats with one bit of mantissa, e2m1, and powers of two that scale groups of them (MXFP4).

``w = 2**e * v``, v one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. A group of 32 columns has
``e = floor(log2(max |w|)) - 2``, so that its largest magnitude is between 4 and 8 powers of two; v is the nearest of
``w / 2**e``, of two that are equally near the one whose last bit is 0, and 6 beyond it.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.codebook import lloyd_max

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0 to 7 stand for; codes 8 to 15 are their negatives, -0 among them."""
_UNUSED = 7.0
"""The last of 16 ascending values: +0 and -0 are one."""
_LARGEST_EXPONENT = 2


def values(device: torch.device | str) -> Tensor:
    """float32 ``[16]``, ascending; the last one is never the nearest."""
    negative = [-v for v in reversed(MAGNITUDES[1:])]
    return torch.tensor([*negative, *MAGNITUDES, _UNUSED], dtype=torch.float32, device=device)


def scales(largest: Tensor) -> Tensor:
    """The power of two of groups whose largest magnitudes these are, float32; 0 for 0."""
    exponent = torch.frexp(largest.float())[1] - 1 - _LARGEST_EXPONENT
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent), 0.0)


def boundaries(device: torch.device | str) -> Tensor:
    """float32 ``[14]``, by which `torch.searchsorted` finds the nearest of `values` to weights divided by scales."""
    middles = lloyd_max.boundaries(values(device)[:-1])
    # Every other value has an even code, and is the nearest of what is midway below it, too.
    middles[::2] = torch.nextafter(middles[::2], torch.full_like(middles[::2], -torch.inf))
    return middles


def are_powers_of_two(norms: Tensor) -> bool:
    """Whether norms are powers of two, or 0."""
    mantissa = torch.frexp(norms.float())[0]
    return bool(((mantissa == 0.5) | (mantissa == 0)).all())
