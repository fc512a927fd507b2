"""4-bit floats with one bit of mantissa, e2m1, and the scales of groups of them: MXFP4 and NVFP4.

``w = scale * v``, v one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: the nearest to ``w / scale``; of two that
are equally near, the one with last bit 0; and 6 beyond 6.

MXFP4: a group of 32 columns has ``scale = 2**e``, ``e = floor(log2(max |w|)) - 2``, so that its largest magnitude is
between 4 and 8 powers of two.

NVFP4, each operation rounded to float32: the tensor has ``global_scale = 448 * 6 / max |w|``, a group of 16 columns
``norm = e4m3(global_scale * (max |w| / 6))`` and ``scale = norm / global_scale``. What is stored of the global scale is
``norm_scale = 1 / global_scale`` in float64, with which ``f32(norm * norm_scale)`` is that scale, bit for bit.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3; NVFP4 as compressed-tensors
0.20 defines it, ``quantization/utils/helpers.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.codebook import lloyd_max
from qcut.numerics.float8 import E4M3, LARGEST

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0 to 7 stand for; codes 8 to 15 are their negatives, -0 among them."""
_UNUSED = 7.0
"""The last of 16 ascending values: +0 and -0 are one."""
_LARGEST_EXPONENT = 2
_LARGEST = MAGNITUDES[-1]
LEAST_NORM_SCALE, MOST_NORM_SCALE = 2.0**-116, 2.0**116
"""Bounds of ``norm_scale``, between which all weights are normal numbers of float32, or 0."""


def values(device: torch.device | str) -> Tensor:
    """float32 ``[16]``, ascending; the last one is never the nearest."""
    negative = [-v for v in reversed(MAGNITUDES[1:])]
    return torch.tensor([*negative, *MAGNITUDES, _UNUSED], dtype=torch.float32, device=device)


def scales(largest: Tensor) -> Tensor:
    """The power of two of groups with these largest magnitudes, float32; 0 for 0."""
    exponent = torch.frexp(largest.float())[1] - 1 - _LARGEST_EXPONENT
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent), 0.0)


def global_scale(largest: Tensor) -> Tensor:
    """NVFP4's global scale, float32, of a tensor with this largest magnitude; 1 if float32 cannot hold the scale."""
    scale = torch.full_like(largest, LARGEST * _LARGEST, dtype=torch.float32) / largest.float()
    return torch.where(scale.isfinite(), scale, 1.0)


def e4m3_norms(largest: Tensor, scale: Tensor) -> Tensor:
    """NVFP4's norms, float8_e4m3fn, of groups with these largest magnitudes, in a tensor of that global scale."""
    sixth = largest.float() / torch.full_like(largest, _LARGEST, dtype=torch.float32)
    return (scale * sixth).clamp(max=LARGEST).to(E4M3)


def float_norms(norms: Tensor, norm_scale: Tensor | None) -> Tensor:
    """What codebook values are multiplied by, float32 ``[N, G]``.

    Args:
        norms: float16, float32 or float8_e4m3fn ``[N, G]``.
        norm_scale: float64 ``[N]`` of e4m3 norms, else None.

    Exactness: ``norm * norm_scale`` is rounded to float64 and then to float32. If ``norm_scale`` is a float32 number or
    the rounded inverse of one, and within its bounds, that is the product, or the quotient, rounded to float32 once:
    the product is exact in float64; a quotient of a number of 4 bits by one of 24 is no midpoint of float32, and at
    least ``2**-49`` of itself away from each.
    """
    return norms.float() if norm_scale is None else (norms.double() * norm_scale[:, None]).float()


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
