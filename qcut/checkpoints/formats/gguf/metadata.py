"""The configuration of a Llama from the metadata of a GGUF file.

Every entry of the architecture's own is read, or holds what changes nothing, or is refused: llama.cpp may compute by
it. Entries of other names describe the file or the tokenizer.

Source: llama.cpp, ``src/llama-model.cpp`` (``load_hparams``) and ``gguf-py/gguf/constants.py`` (``Keys``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcut.checkpoints.formats.gguf.container import GgufTensor
from qcut.errors import CheckpointError, UnsupportedError

_READ = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"),
    *("attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.type"),
    "vocab_size",
)
_DESCRIPTIONS = ("rope.scaling.finetuned", "rope.scaling.original_context_length")
"""Of rotations that are scaled by other types than those that are read, and of no influence on these."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""What an entry may hold that changes nothing, as writers put it there."""
_ENDS = ("eos", "eot", "eom")


def config_of(data: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: Path) -> dict[str, Any]:
    """The configuration of a ``LlamaForCausalLM``.

    Args:
        data: the metadata.
        tensors: of the file.
        where: the file, for messages.

    Raises:
        UnsupportedError: an entry that llama.cpp may compute by and qcut does not (named).
        CheckpointError: an entry is missing, or of another type.
    """
    entry = _Entries(data, where).entry
    heads, hidden = entry("attention.head_count", int), entry("embedding_length", int)
    head, context = entry("attention.key_length", int, hidden // heads), entry("context_length", int)
    if (values := entry("attention.value_length", int, head)) != head:
        raise UnsupportedError(f"{where}: keys of {head} and values of {values} columns a head; equal ones are served")
    if (rotated := entry("rope.dimension_count", int, head)) != head:
        raise UnsupportedError(f"{where}: {rotated} of {head} dimensions of a head are rotated; all are served")
    _refuse_others(data, {"attention.scale": (0, _float32(1 / math.sqrt(head)))}, where)
    if "rope_freqs.weight" in tensors:
        raise UnsupportedError(f"{where}: rope_freqs.weight: scaled rotations; {_BESIDE}")
    tokens = data.get("tokenizer.ggml.tokens")
    embedding = tensors.get("token_embd.weight")
    size = embedding.shape[0] if embedding else len(tokens) if isinstance(tokens, list) else entry("vocab_size", int)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": entry("feed_forward_length", int),
        "num_hidden_layers": entry("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": entry("attention.head_count_kv", int, heads),
        "head_dim": head,
        "max_position_embeddings": context,
        "rms_norm_eps": entry("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": {"rope_theta": entry("rope.freq_base", float, 10000.0), **_scaling(data, where)},
        "vocab_size": size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        **_tokens(data, size, where),
    }


def check_config(config: Mapping[str, Any], data: Mapping[str, Any], where: Path) -> None:
    """Hold a ``config.json`` next to a file to the metadata, which it may extend, by scaled rotations for instance.

    Args:
        config: as JSON holds it.
        data: the metadata.
        where: the GGUF file, for messages.

    Raises:
        CheckpointError: both state a number of heads, an epsilon, a base of rotations or their factor, and not the
            same one (named).
        UnsupportedError: an entry that llama.cpp may compute by, and that the configuration does not state (named).
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    kind = rope.get("rope_type", rope.get("type")) or "default"
    heads = config.get("num_attention_heads")
    stated = {
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope.freq_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
    }
    scaled = data.get("llama.rope.scaling.type") not in (None, "none", "linear")
    if not scaled and (scaling := _scaling(data, where))["rope_type"] == "linear":
        scaled, stated["rope.scaling.factor"] = True, rope.get("factor") if kind == "linear" else None
        data = {**data, "llama.rope.scaling.factor": scaling["factor"]}
    for key, value in stated.items():
        found = data.get(f"llama.{key}")
        if found is not None and not _same(found, value):
            raise CheckpointError(
                f"{where}: metadata llama.{key}: found {_short(found)}; config.json next to it has {_short(value)}; "
                "allowed: the same in both, or no config.json"
            )
    if scaled and kind == "default":
        found = data.get("llama.rope.scaling.type")
        raise UnsupportedError(f"{where}: llama.rope.scaling.type {_short(found)}; config.json has none; {_BESIDE}")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{where}: config.json next to it has the hidden_act {_short(act)}; allowed: 'silu'")
    head = data.get("llama.attention.key_length") or config.get("head_dim")
    neutral: dict[str, tuple[Any, ...]] = {"attention.sliding_window": (0, config.get("sliding_window"))}
    if isinstance(head, int) and head > 0:
        neutral["attention.scale"] = (0, _float32(1 / math.sqrt(head)))
    described = "llama.rope.scaling." if kind != "default" else "\0"
    _refuse_others({key: value for key, value in data.items() if not key.startswith(described)}, neutral, where)


def _same(found: Any, value: Any) -> bool:
    numbers = type(found) in (int, float) and type(value) in (int, float)
    return numbers and math.isclose(found, value, rel_tol=1e-6)  # metadata have float32


def check_architecture(data: Mapping[str, Any], where: Path) -> None:
    """Check that a file is a Llama's, whose rows of q and k lie in the order that is read.

    Raises:
        UnsupportedError: another architecture, or no model.
    """
    if (kind := data.get("general.type", "model")) != "model":
        raise UnsupportedError(f"{where}: general.type is {_short(kind)}; 'model' is served")
    if (architecture := data.get("general.architecture")) != "llama":
        raise UnsupportedError(f"{where}: general.architecture is {_short(architecture)}; llama is served")


_BESIDE = "put the model's config.json next to the file"


class _Entries:
    """Numbers of the metadata."""

    def __init__(self, data: Mapping[str, Any], where: Path) -> None:
        self._data, self._where = data, where

    def entry(self, key: str, kind: type[int] | type[float], default: Any = None) -> Any:
        """A number above 0."""
        value: Any = self._data.get(f"llama.{key}", default)
        if type(value) is not kind or not 0 < value < 1 << 24:
            raise CheckpointError(
                f"{self._where}: metadata llama.{key}: found {_short(value)}; a {kind.__name__} above 0 is needed"
            )
        return value


def _refuse_others(data: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]], where: Path) -> None:
    """Refuse entries of the architecture that are not read and hold something."""
    neutral = {**_NEUTRAL, **more}
    for key, value in data.items():
        name = key.removeprefix("llama.")
        if name == key or name in _READ or name in _DESCRIPTIONS:
            continue
        allowed = neutral.get(name, ())
        if not any(type(value) in (bool, int, float, str) and value == one for one in allowed):
            what = " or ".join(map(repr, allowed)) or "no such entry"
            raise UnsupportedError(
                f"{where}: metadata {key}: found {_short(value)}, which llama.cpp may compute by; allowed: {what}"
            )


def _scaling(data: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """How rotations are scaled: a factor without a type is linear, as llama.cpp reads it, and one of type none is not.

    The factor's older name counts where the newer one is missing.
    """
    kind = data.get("llama.rope.scaling.type", "linear")
    if kind not in ("linear", "none"):
        raise UnsupportedError(f"{where}: llama.rope.scaling.type {_short(kind)}: scaled rotations; {_BESIDE}")
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        if key in data:
            factor = data[key]
            if type(factor) not in (int, float) or not 0 <= factor < 1 << 24:
                raise CheckpointError(f"{where}: metadata {key}: found {_short(factor)}; a number from 0 is needed")
            if kind == "linear" and factor not in (0, 1):
                return {"rope_type": "linear", "factor": float(factor)}
            break
    return {"rope_type": "default"}


def _tokens(data: Mapping[str, Any], size: int, where: Path) -> dict[str, Any]:
    found: dict[str, int | None] = {}
    for name in ("bos", *_ENDS):
        token = found[name] = data.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (type(token) is not int or not 0 <= token < size):
            raise CheckpointError(
                f"{where}: metadata tokenizer.ggml.{name}_token_id: found {_short(token)}; allowed: 0 to {size - 1}"
            )
    ends = list(dict.fromkeys(found[name] for name in _ENDS if found[name] is not None))
    return {"bos_token_id": found["bos"], "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else f"{value!r:.80}"
