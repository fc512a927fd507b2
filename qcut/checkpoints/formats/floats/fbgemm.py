"""FP8 of FBGEMM, as transformers writes it: e4m3 with a scale for each row."""

from __future__ import annotations

from typing import Any

from qcut.checkpoints.formats.floats.e4m3 import E4m3Layout
from qcut.checkpoints.formats.parts import refuse_others

_FIELDS = ("activation_scale_ub", "modules_to_not_convert", "quant_method")
"""What the configuration says of layers that are left in float is seen from their tensors."""


class FbgemmFp8(E4m3Layout):
    """Reads ``weight`` and ``weight_scale``; see `Format`."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        refuse_others(config, _FIELDS, f"{where}: quantization_config")
        super().__init__("weight_scale", 1, unused=("input_scale_ub",))
