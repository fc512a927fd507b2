"""Floats of NVIDIA's Model Optimizer: e4m3 with a scale for each layer, row or block, and NVFP4."""

from __future__ import annotations

from typing import Any

from qcut.checkpoints.formats.floats.e2m1 import Nvfp4Layout
from qcut.checkpoints.formats.floats.e4m3 import INPUT_SCALE, E4m3Layout
from qcut.checkpoints.formats.parts import refuse_others
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError
from qcut.schemes import NVFP4_GROUP

_TOKENS, _CACHES = (INPUT_SCALE,), ("k_scale", "v_scale")
_NVFP4 = Nvfp4Layout("weight", "weight_scale_2", divides=False, unused=_TOKENS, cache_scales=_CACHES)
_LAYOUTS: dict[str, E4m3Layout | Nvfp4Layout] = {
    "FP8": E4m3Layout("weight_scale", None, tokens="stored", cache_scales=_CACHES),
    "FP8_PER_CHANNEL_PER_TOKEN": E4m3Layout("weight_scale", 1, tokens="dynamic", unused=_TOKENS, cache_scales=_CACHES),
    "FP8_PB_WO": E4m3Layout("weight_scale", 128, 128, unused=_TOKENS, cache_scales=_CACHES),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
"""By ``quant_algo``."""
_GROUP_SIZE = {"group_size": (schema.nothing_or(schema.integer()), None)}
_ALGORITHM = {"quant_algo": (schema.nothing_or(schema.text()), None), **_GROUP_SIZE}
_GROUP = schema.record({}, {"weights": (schema.nothing_or(schema.record({}, _GROUP_SIZE, more=True)), None)}, more=True)
_CONFIG = schema.record(
    {},
    {
        **_ALGORITHM,
        "quantization": (schema.record({}, _ALGORITHM, more=True), {}),
        "config_groups": (schema.nothing_or(schema.table(_GROUP)), None),
    },
    more=True,
)
_FIELDS = (
    *("config_groups", "exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer", "quant_algo"),
    *("quant_method", "quantization"),
)
"""What the configuration says of layers that are left in float is seen from their tensors."""


def model_opt(config: dict[str, Any], where: str) -> E4m3Layout | Nvfp4Layout:
    """What reads ``weight`` and ``weight_scale``, and ``weight_scale_2`` of NVFP4; see `Format`.

    The configuration is that of config.json, or that of hf_quant_config.json, which has it under ``quantization``.
    """
    where = f"{where}: quantization_config"
    data = schema.conform(config, _CONFIG, where, CheckpointError)
    found = str(data["quant_algo"] or data["quantization"].get("quant_algo"))[:80]
    layout = _LAYOUTS.get(found.upper())  # writers spell one in small letters
    if layout is None:
        raise UnsupportedError(f"{where}: quant_algo is {found!r}; {', '.join(_LAYOUTS)} are served")
    grouped = isinstance(layout, Nvfp4Layout)
    for fields in (config, data["quantization"]):
        refuse_others(fields, (*_FIELDS, "group_size") if grouped else _FIELDS, where)
    groups = [(group["weights"] or {}) for group in (data["config_groups"] or {}).values()]
    for fields in (data, data["quantization"], *groups):
        if grouped and fields.get("group_size") not in (None, NVFP4_GROUP):
            raise UnsupportedError(f"{where}: group_size is {fields['group_size']}; {NVFP4_GROUP} is served of {found}")
    return layout
