"""4-bit floats with one bit of mantissa, e2m1, and the powers of two that scale groups of them (MXFP4).

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.checkpoints.formats.parts import Parts
from qcut.errors import UnsupportedError
from qcut.numerics.codebook.layout import row_exponents

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = torch.tensor([*_MAGNITUDES, *(-v for v in _MAGNITUDES)], dtype=torch.float32, device="cpu")
"""What codes 0 to 15 stand for; 8 is -0."""
GROUP = 32
"""Columns that share a power of two."""
_BIAS, _NAN = 127, 255
_LARGEST = 252 - _BIAS
"""The largest exponent whose products with 6 are finite in float32."""


def codes_of(packed: Tensor) -> Tensor:
    """Codes uint8 ``[..., K]`` of bytes uint8 ``[..., K / 2]``, the first of two in the low half."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def powers_of(parts: Parts, key: str, codes: Tensor) -> Tensor:
    """Scales of groups, float32 ``[N, G]``; 0 of groups of zeros, whatever their scale.

    Args:
        parts: of the layer.
        key: of its tensor of exponents plus 127, uint8 ``[N, G]``.
        codes: of e2m1, uint8 ``[N, G, columns]``.

    Raises:
        CheckpointError: a scale is NaN, which 255 stands for.
        UnsupportedError: weights that float32 does not hold, or rows whose scales kernels do not hold together.
    """
    exponents = parts.read(key).to(torch.int32) - _BIAS
    used = (codes & 7).amax(-1) > 0
    if bool((exponents == _NAN - _BIAS).any()):
        at = (exponents == _NAN - _BIAS).nonzero()[0].tolist()
        raise parts.error(key, f"found {_NAN} at {at}, which is NaN; 0 to {_NAN - 1} are needed")
    if bool((used & (exponents > _LARGEST)).any()):
        at = (used & (exponents > _LARGEST)).nonzero()[0].tolist()
        raise UnsupportedError(
            f"{parts.where}: tensor {parts.full(key)!r}: found {int(exponents[tuple(at)]) + _BIAS} at {at}; up to "
            f"{_LARGEST + _BIAS}, whose weights float32 holds, are served"
        )
    scales = torch.where(used, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents), 0.0)
    relative = scales / row_exponents(scales)[:, None]
    lost = (relative.half().float() != relative).nonzero()
    if len(lost):
        at = lost[0].tolist()
        raise UnsupportedError(
            f"{parts.where}: tensor {parts.full(key)!r}: found 2**{int(exponents[tuple(at)])} at {at}, in a row with "
            f"2**{int(exponents[at[0]][used[at[0]]].max())}; scales of a row that are 2**24 apart at most are served"
        )
    return scales
