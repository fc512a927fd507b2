"""MXFP4 as GPT-OSS has it: experts of e2m1 with a power of two for each 32 columns, all experts in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.e2m1 import GROUP, LEVELS, codes_of, powers_of
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import Parts, Stored, refuse_others
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear

_FIELDS = ("dequantize", "modules_to_not_convert", "quant_method")
"""What the configuration says of layers that have no blocks is seen from their tensors."""


class Mxfp4:
    """Reads experts ``[E, N, K]``; see `Format` and `IntegerFormat`.

    ``blocks`` uint8 ``[E, N, K / 32, 16]``, two e2m1 along K, the first in the low half; ``scales`` uint8
    ``[E, N, K / 32]``, the exponent of a power of two, plus 127. Rows are those of the product, gates and ups in turn
    where the model's are.
    """

    stacked = ("blocks", "scales")
    """Behind the name of a parameter of experts and ``_``, the ends of the names of its tensors."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        refuse_others(config, _FIELDS, f"{where}: quantization_config")

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "blocks" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k = parts.n, parts.k
        parts.only(("blocks", "scales", "bias"))
        if k % GROUP:
            raise UnsupportedError(f"{parts.where}: {parts.name!r} has {k} columns; a multiple of {GROUP} is served")
        parts.require("blocks", ("U8",), [n, k // GROUP, GROUP // 2])
        parts.require("scales", ("U8",), [n, k // GROUP])

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return codes_of(parts.read("blocks").flatten(1))

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        scales = powers_of(parts, "scales", self.codes(parts).view(parts.n, -1, GROUP))
        return Grid(4, scales, None, GROUP, levels=LEVELS)

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, self.codes(parts), self.grid(parts))
