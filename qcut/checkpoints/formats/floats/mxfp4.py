"""MXFP4 as GPT-OSS has it: experts of e2m1 with a power of two for each 32 columns, all experts in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qcut.checkpoints.formats.floats.e2m1 import Mxfp4Layout
from qcut.checkpoints.formats.parts import Stored, refuse_others

_FIELDS = ("dequantize", "modules_to_not_convert", "quant_method")
"""What the configuration says of layers that have no blocks is seen from their tensors."""


class Mxfp4(Mxfp4Layout):
    """Reads experts ``[E, N, K]``; see `StackedFormat`.

    ``blocks`` uint8 ``[E, N, K / 32, 16]``, two e2m1 along K, the first in the low half; ``scales`` uint8
    ``[E, N, K / 32]``. Rows are those of the product, gates and ups in turn where the model's are.
    """

    packed, scales, blocks = "blocks", "scales", True
    stacked = (packed, scales)

    def __init__(self, config: dict[str, Any], where: str) -> None:
        refuse_others(config, _FIELDS, f"{where}: quantization_config")

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return self.packed in tensors
