"""Llamas in GGUF files: names, sizes and rows of llama.cpp turned into those of transformers, and its blocks read.

- ``Q4_0``: 18 bytes of 32 values: float16 d, then 16 bytes, whose low halves are the first 16 values: ``d * (q - 8)``.
  d has the sign of the largest value.
- ``Q8_0``: 34 bytes of 32 values: float16 d, then 32 int8: ``d * q``.

llama.cpp rotates neighbouring elements of a head where transformers rotates halves, so the rows of q and k lie
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import byte_layer, integer_layer
from qcut.checkpoints.formats.gguf.container import GgufModel
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.numerics.checks import out_of_range

_BLOCK = 32
_QUANTIZED = ("Q4_0", "Q8_0")
_PLAIN = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


class Gguf:
    """The blocks of GGUF files, see `qcut.checkpoints.formats.parts.Format`."""

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "weight" in tensors and tensors["weight"].code in _QUANTIZED

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        parts.only(("weight", "bias"))
        parts.require("weight", _QUANTIZED, [parts.n, parts.k])
        parts.require_bias()

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        n, k = parts.n, parts.k
        blocks = parts.read("weight")
        scales = blocks[..., :2].contiguous().view(torch.float16).view(n, k // _BLOCK)
        if found := out_of_range(scales):
            raise parts.error("weight", f"found the scale {found}; finite ones are needed")
        values = blocks[..., 2:]
        if parts.tensors["weight"].code == "Q4_0":
            q = torch.cat((values & 15, values >> 4), -1).reshape(n, k)
            return integer_layer(parts, q, Grid(4, scales, None, _BLOCK))
        return byte_layer(parts, values.reshape(n, k) ^ 0x80, Grid(8, scales, None, _BLOCK))


def tensors_of(file: GgufModel, config: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a Llama, by their names in transformers.

    Args:
        file: the file.
        config: of the model; its numbers of heads decide which rows of q and k belong together.

    Raises:
        CheckpointError: a tensor of a name that a Llama does not have, or q and k whose rows are no whole heads.
        UnsupportedError: factors of rotations that the configuration does not state.
    """
    heads = config.get("num_attention_heads")
    counts = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    stored: dict[str, Stored] = {}
    for name, place in file.tensors.items():
        if name == "rope_freqs.weight":  # the configuration has to state what these factors come of
            scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
            kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
            if kind in (None, "default", "linear"):
                raise UnsupportedError(f"{file.path}: rope_freqs.weight; config.json has rotations of type {kind!r}")
            continue
        match = _NAME.fullmatch(name)
        if name in _PLAIN:
            new = _PLAIN[name]
        elif match and match[2] in _LAYER:
            new = f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
        else:
            raise CheckpointError(f"{file.path}: tensor {name!r} is none of a Llama's")
        count = counts.get(match[2]) if match else None
        if count is not None and (type(count) is not int or count < 1 or place.shape[0] % (2 * count)):
            raise CheckpointError(
                f"{file.path}: tensor {name!r}: {place.shape[0]} rows for {count!r} heads; pairs of rows are needed"
            )
        stored[new] = Stored(place.kind, place.shape, _reader(file, name, count))
    return stored


def _reader(file: GgufModel, name: str, heads: int | None) -> Callable[[], Tensor]:
    if heads is None:
        return lambda: file.read(name)
    return lambda: _halves(file.read(name), heads)


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows with the first elements of all pairs of a head before the second ones."""
    n, rest = rows.shape[0], rows.shape[1:]
    return rows.view(heads, n // heads // 2, 2, *rest).transpose(1, 2).reshape(n, *rest)
