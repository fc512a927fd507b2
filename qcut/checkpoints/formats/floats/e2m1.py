"""4-bit floats with one bit of mantissa, e2m1, and the powers of two that scale groups of them (MXFP4).

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import Parts
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from qcut.numerics.codebook.float4 import MAGNITUDES
from qcut.numerics.codebook.layout import row_exponents
from qcut.schemes import E2M1_GROUP

LEVELS = torch.tensor([*MAGNITUDES, *(-v for v in MAGNITUDES)], dtype=torch.float32, device="cpu")
"""What codes 0 to 15 stand for; 8 is -0."""
BIAS, _NAN = 127, 255
_LARGEST = 252 - BIAS
"""The largest exponent whose products with 6 are finite in float32."""


def codes_of(packed: Tensor) -> Tensor:
    """Codes uint8 ``[..., K]`` of bytes uint8 ``[..., K / 2]``, the first of two in the low half."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


class Mxfp4Layout:
    """Weights of which each 32 columns have a scale; see `IntegerFormat`.

    Attributes:
        packed: key of the tensor of codes, uint8 ``[N, K / 2]``, or as ``blocks`` of 16 bytes.
        scales: key of the tensor of scales, uint8 ``[N, K / 32]``: the exponent of a power of two, plus 127.
        blocks: whether codes are ``[N, K / 32, 16]``.
    """

    packed: ClassVar[str]
    scales: ClassVar[str]
    blocks: ClassVar[bool] = False

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k = parts.n, parts.k
        parts.only((self.packed, self.scales, "bias"))
        if k % E2M1_GROUP:
            raise UnsupportedError(
                f"{parts.where}: layer {parts.name!r} has {k} columns; a multiple of {E2M1_GROUP} is served of MXFP4"
            )
        parts.require(self.packed, ("U8",), [n, k // E2M1_GROUP, E2M1_GROUP // 2] if self.blocks else [n, k // 2])
        parts.require(self.scales, ("U8",), [n, k // E2M1_GROUP])

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return codes_of(parts.read(self.packed).flatten(1))

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`. Groups of zeros have the scale 0, whatever is stored.

        Raises:
            CheckpointError: a scale is NaN, which 255 stands for.
            UnsupportedError: weights that float32 does not hold, or rows whose scales kernels do not hold together.
        """
        exponents = parts.read(self.scales).to(torch.int32) - BIAS
        # Without the signs of both codes of a byte.
        used = (parts.read(self.packed).view(parts.n, -1, E2M1_GROUP // 2) & 0x77).amax(-1) > 0
        where = f"{parts.where}: tensor {parts.full(self.scales)!r}"
        if len(at := (exponents == _NAN - BIAS).nonzero()):
            raise parts.error(
                self.scales, f"found {_NAN} at {at[0].tolist()}, which is NaN; 0 to {_NAN - 1} are needed"
            )
        if len(at := (used & (exponents > _LARGEST)).nonzero()):
            raise UnsupportedError(
                f"{where}: found {int(exponents[tuple(at[0])]) + BIAS} at {at[0].tolist()}; up to {_LARGEST + BIAS}, "
                "whose weights float32 holds, are served"
            )
        scales = torch.where(used, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents), 0.0)
        relative = scales / row_exponents(scales)[:, None]
        if len(at := (relative.half().float() != relative).nonzero()):
            row = int(at[0, 0])
            raise UnsupportedError(
                f"{where}: found 2**{int(exponents[tuple(at[0])])} at {at[0].tolist()}, in a row with "
                f"2**{int(exponents[row][used[row]].max())}; scales of a row that are 2**24 apart at most are served"
            )
        return Grid(4, scales, None, E2M1_GROUP, levels=LEVELS)

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, self.codes(parts), self.grid(parts))
