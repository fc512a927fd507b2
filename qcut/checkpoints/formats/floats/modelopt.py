"""FP8 of NVIDIA's Model Optimizer: e4m3 with a scale for each layer, row or block."""

from __future__ import annotations

from typing import Any

from qcut.checkpoints.formats.floats.e4m3 import E4m3Layout
from qcut.checkpoints.formats.parts import refuse_others
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError

_BLOCKS = {"FP8": (None, None), "FP8_PER_CHANNEL_PER_TOKEN": (1, None), "FP8_PB_WO": (128, 128)}
"""By ``quant_algo``, the rows and the columns that share a scale; None: all."""
_UNUSED = ("input_scale", "k_scale", "v_scale")
_ALGORITHM = {"quant_algo": (schema.nothing_or(schema.text()), None)}
_CONFIG = schema.record({}, {**_ALGORITHM, "quantization": (schema.record({}, _ALGORITHM, more=True), {})}, more=True)
_FIELDS = (
    *("config_groups", "exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer", "quant_algo"),
    *("quant_method", "quantization"),
)
"""What the configuration says of layers that are left in float is seen from their tensors."""


class ModelOpt(E4m3Layout):
    """Reads ``weight`` and ``weight_scale``; see `Format`.

    The configuration is that of config.json, or that of hf_quant_config.json, which has it under ``quantization``.
    """

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        for fields in (config, data["quantization"]):
            refuse_others(fields, _FIELDS, where)
        found = str(data["quant_algo"] or data["quantization"].get("quant_algo"))[:80]
        if found.upper() not in _BLOCKS:  # writers spell one in small letters
            raise UnsupportedError(f"{where}: quant_algo is {found!r}; {', '.join(_BLOCKS)} are served")
        super().__init__("weight_scale", *_BLOCKS[found.upper()], unused=_UNUSED)
