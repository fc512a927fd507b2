"""bitsandbytes checkpoints: 4 bits of nf4 or fp4, and LLM.int8.

- 4 bits: ``weight`` bytes of two indices, the first in the high half, all rows one behind another; ``weight.absmax``, a
  scale for each block, float32, or bytes that ``weight.nested_quant_map``, ``weight.nested_absmax`` and an offset
  make floats of; ``weight.quant_map`` float32 ``[16]``; ``weight.quant_state.bitsandbytes__nf4``, JSON as bytes.
- int8: ``weight`` int8 ``[N, K]``, ``SCB`` float32 ``[N]``, the largest magnitude of each row, ``weight_format``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import levels_layer, row_layer
from qcut.checkpoints.formats.parts import Parts, Stored, refuse_others
from qcut.common import schema
from qcut.common.safetensors import DTYPES
from qcut.common.schema import parse_json
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.schemes import W8A8, W8A16

_CONFIG = schema.record(
    {},
    {
        "load_in_4bit": (schema.boolean(), False),
        "load_in_8bit": (schema.boolean(), False),
        "llm_int8_threshold": (schema.number(0.0), 6.0),
    },
    more=True,
)
_FIELDS = (
    *("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"),
    *("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    *("llm_int8_skip_modules", "llm_int8_threshold", "load_in_4bit", "load_in_8bit", "quant_method"),
)
"""Types of weights and which layers are quantized stand with the tensors, which are believed."""
_STATE = schema.record(
    {
        "quant_type": schema.text(choices=("nf4", "fp4")),
        "blocksize": schema.integer(1, 1 << 24),
        "shape": schema.items(schema.integer(1), 2),
    },
    {
        "nested_blocksize": (schema.integer(1, 1 << 24), 256),
        "nested_offset": (schema.number(), 0.0),
    },
    more=True,
)
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_STATE_BYTES = 1 << 16


class BitsAndBytes:
    """Reads bitsandbytes layers; see `Format`."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        refuse_others(config, _FIELDS, where)
        # Without a threshold that library quantizes whole tokens, as W8A8 does; with one it keeps large columns in
        # float16, which no int8 product does: only weights are int8 then.
        self._int8 = W8A8() if data["llm_int8_threshold"] == 0 else W8A16()

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "SCB" in tensors or "weight.absmax" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k = parts.n, parts.k
        parts.require_bias()
        if "SCB" in parts.tensors:
            parts.only(("weight", "SCB", "weight_format", "bias"))
            parts.require("weight", ("I8",), [n, k])
            parts.require("SCB", ("F32",), [n])
            if "weight_format" in parts.tensors:
                parts.require("weight_format", ("U8",), [], [1])
            return
        parts.only(("weight", "weight.absmax", "weight.quant_map", *_STATES, *_NESTED, "bias"))
        stored = parts.tensors.get("weight")
        if stored is None or stored.code not in DTYPES or _nbytes(parts, "weight") * 2 != n * k:
            found = "nothing" if stored is None else f"{stored.code} {list(stored.shape)}"
            raise parts.error("weight", f"found {found}; needed: {n * k / 2:g} bytes, two indices each")
        parts.require("weight.quant_map", ("F32",), [16])
        states = [key for key in _STATES if key in parts.tensors]
        if len(states) != 1:
            raise parts.error(_STATES[0], f"found {len(states)} states; needed: one")
        state = parts.tensors[states[0]]
        if state.code != "U8" or len(state.shape) != 1 or not 2 <= state.shape[0] <= _STATE_BYTES:
            found = f"{state.code} {list(state.shape)}"
            raise parts.error(states[0], f"found {found}; needed: U8, up to {_STATE_BYTES}")
        nested = _NESTED[0] in parts.tensors
        absmax = parts.tensors["weight.absmax"]
        if absmax.code != ("U8" if nested else "F32") or len(absmax.shape) != 1:
            found, needed = (
                f"{absmax.code} {list(absmax.shape)}",
                "F32 of one dimension, or U8 with weight.nested_absmax",
            )
            raise parts.error("weight.absmax", f"found {found}; needed: {needed}")
        if nested:
            parts.require("weight.nested_quant_map", ("F32",), [256])

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return self._int8_layer(parts) if "SCB" in parts.tensors else _four_bits(parts)

    def _int8_layer(self, parts: Parts) -> Linear:
        if "weight_format" in parts.tensors and (form := int(parts.read("weight_format"))):
            raise UnsupportedError(
                f"{parts.where}: tensor '{parts.name}.weight_format': found {form}; 0, plain rows, is served"
            )
        return row_layer(parts, parts.read("weight"), parts.read_scales("SCB") / 127, self._int8)


def _four_bits(parts: Parts) -> Linear:
    n, k = parts.n, parts.k
    key = next(key for key in _STATES if key in parts.tensors)
    state = _state(parts, key)
    size = state["blocksize"]
    if state["shape"] != [n, k]:
        raise parts.error(key, f"found the shape {state['shape']}; the model needs {[n, k]}")
    if k % size:
        raise UnsupportedError(
            f"{parts.where}: layer {parts.name!r}: blocks of {size} run over the ends of rows of {k} columns; "
            "blocks that fill rows are served"
        )
    scales = _scales(parts, state, n * k // size).view(n, k // size)
    packed = parts.read("weight").reshape(-1).view(torch.uint8)
    indices = torch.stack((packed >> 4, packed & 15), 1).view(n, k)
    levels = parts.read_scales("weight.quant_map")
    return levels_layer(parts, indices, levels, scales, size, "weight.absmax")


def _state(parts: Parts, key: str) -> dict[str, Any]:
    where = f"{parts.where}: tensor {parts.full(key)!r}"
    data = parse_json(parts.read(key).numpy().tobytes(), where, CheckpointError)
    state: dict[str, Any] = schema.conform(data, _STATE, where, CheckpointError)
    return state


def _scales(parts: Parts, state: dict[str, Any], blocks: int) -> Tensor:
    """float32 ``[blocks]``, as that library computes them."""
    parts.require("weight.absmax", ("F32", "U8"), [blocks])
    if _NESTED[0] not in parts.tensors:
        return parts.read_scales("weight.absmax")
    size = state["nested_blocksize"]
    parts.require(_NESTED[0], ("F32",), [-(-blocks // size)])
    outer, values = (parts.read_scales(key) for key in _NESTED)
    inner = values[parts.read("weight.absmax").int()]
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device="cpu")
    return inner * outer.repeat_interleave(size)[:blocks] + offset


def _nbytes(parts: Parts, key: str) -> int:
    stored = parts.tensors[key]
    return DTYPES[stored.code][1] * math.prod(stored.shape)
