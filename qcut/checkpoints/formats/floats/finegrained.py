"""FP8 of transformers: e4m3 with a scale for each layer, or for blocks of it."""

from __future__ import annotations

from typing import Any

from qcut.checkpoints.formats.floats.e4m3 import E4m3Layout
from qcut.checkpoints.formats.parts import refuse_others
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError

_CONFIG = schema.record(
    {},
    {
        "weight_block_size": (schema.nothing_or(schema.items(schema.integer(1))), (128, 128)),
        "scale_fmt": (schema.nothing_or(schema.text()), "float"),
        "expert_dtype": (schema.nothing_or(schema.text()), "fp8"),
        "fmt": (schema.nothing_or(schema.text()), "e4m3"),
    },
    more=True,
)
_SERVED = {"scale_fmt": "float", "expert_dtype": "fp8", "fmt": "e4m3"}
_FIELDS = (
    *("activation_scheme", "dequantize", "ignored_layers", "modules_to_convert", "modules_to_not_convert"),
    *("quant_method", "weight_block_size", *_SERVED),
)
"""What the configuration says of layers that are left in float is seen from their tensors."""


class FinegrainedFp8(E4m3Layout):
    """Reads ``weight`` and ``weight_scale_inv``, by which it is multiplied; see `Format`."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        refuse_others(config, _FIELDS, where)
        for key, served in _SERVED.items():
            if data[key] not in (None, served):
                raise UnsupportedError(f"{where}: {key} is {data[key][:80]!r}; {served} is served")
        block = data["weight_block_size"]
        if block is not None and len(block) != 2:
            raise CheckpointError(f"{where}: weight_block_size has {len(block)} numbers; rows and columns are needed")
        super().__init__("weight_scale_inv", *(block or (None, None)), unused=("activation_scale",))
