"""4-bit floats with one bit of mantissa, e2m1, and the scales of groups of them: MXFP4 and NVFP4.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1; compressed-tensors 0.20,
``compressors/nvfp4``; ModelOpt 0.47, ``quantization/qtensor/nvfp4_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import Parts, Stored
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook.float4 import MAGNITUDES
from qcut.numerics.codebook.layout import row_exponents
from qcut.numerics.codebook.passes import scale_problem
from qcut.schemes import E2M1_GROUP, NVFP4_GROUP

LEVELS = torch.tensor([*MAGNITUDES, *(-v for v in MAGNITUDES)], dtype=torch.float32, device="cpu")
"""What codes 0 to 15 stand for; 8 is -0."""
BIAS, _NAN = 127, 255
_LARGEST = 252 - BIAS
"""The largest exponent that gives finite products with 6 in float32."""


def codes_of(packed: Tensor) -> Tensor:
    """Codes uint8 ``[..., K]`` of bytes uint8 ``[..., K / 2]``, the first of two in the low half."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


class Mxfp4Layout:
    """Weights with a scale for each 32 columns; see `IntegerFormat`.

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
        _check_columns(parts, E2M1_GROUP, "MXFP4")
        parts.require(self.packed, ("U8",), [n, k // E2M1_GROUP, E2M1_GROUP // 2] if self.blocks else [n, k // 2])
        parts.require(self.scales, ("U8",), [n, k // E2M1_GROUP])

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return codes_of(parts.read(self.packed).flatten(1))

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`. Groups of zeros have the scale 0, whatever is stored.

        Raises:
            CheckpointError: a scale is NaN, which 255 stands for.
            UnsupportedError: weights that float32 does not hold, or rows with scales that kernels do not hold together.
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


class Nvfp4Layout:
    """Weights with a scale for each 16 columns, and another for the layer: ``weight = scale * value``.

    The tensors are uint8 ``[N, K / 2]``, two e2m1 along K, the first in the low half; e4m3 scales ``[N, K / 16]``; and
    the layer's scale, float32 ``[1]`` or ``[]``. Tokens that the writer would quantize stay in 16 bits, and caches in
    their own type. See `IntegerFormat`.

    Args:
        packed: key of the tensor of codes.
        whole: key of the layer's scale.
        divides: whether the layer's scale divides those of groups; else they are multiplied by it.
        unused: keys of scales of tokens.
        cache_scales: see `CacheFormat`.
    """

    scales = "weight_scale"

    def __init__(
        self,
        packed: str,
        whole: str,
        *,
        divides: bool,
        unused: tuple[str, ...] = (),
        cache_scales: tuple[str, ...] = (),
    ) -> None:
        self._packed, self._whole, self._divides, self._unused = packed, whole, divides, unused
        self.cache_scales = cache_scales

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return self.scales in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k = parts.n, parts.k
        parts.only((self._packed, self.scales, self._whole, *self._unused, *self.cache_scales, "bias"))
        _check_columns(parts, NVFP4_GROUP, "NVFP4")
        parts.require(self._packed, ("U8",), [n, k // 2])
        parts.require(self.scales, ("F8_E4M3",), [n, k // NVFP4_GROUP])
        parts.require(self._whole, ("F32",), [1], [])

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return codes_of(parts.read(self._packed))

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`.

        Raises:
            CheckpointError: a scale is NaN or below 0, or the layer's is not finite and above 0.
            UnsupportedError: the layer's scale, or its inverse, is beyond what a layer holds.
        """
        scales, whole = parts.read_scales(self.scales, 0.0), parts.read(self._whole).double().reshape(1)
        if found := out_of_range(whole, 0.0, above=True):
            raise parts.error(self._whole, f"found {found}; a finite value above 0 is needed")
        # In float64 a group's scale is the writer's, once it is rounded to float32: see `float4.float_norms`.
        factor = whole.reciprocal() if self._divides else whole
        if problem := scale_problem(factor):
            what = "the inverse" if self._divides else "the value"
            raise UnsupportedError(f"{parts.where}: tensor {parts.full(self._whole)!r}: of {what}, {problem}")
        return Grid(4, scales, None, NVFP4_GROUP, levels=LEVELS, row_factor=factor.expand(parts.n).clone())

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, self.codes(parts), self.grid(parts))


def _check_columns(parts: Parts, group: int, name: str) -> None:
    """Refuse rows that are no whole groups."""
    if parts.k % group:
        raise UnsupportedError(
            f"{parts.where}: layer {parts.name!r} has {parts.k} columns; a multiple of {group} is served of {name}"
        )
