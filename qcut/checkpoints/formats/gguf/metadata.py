"""The configuration of a model of transformers from the metadata of a GGUF file.

Every entry of the architecture's own is read, or holds what changes nothing, or is refused: llama.cpp may compute by
it. Entries of other names describe the file or the tokenizer.

Source: llama.cpp, ``src/llama-model.cpp`` and ``src/models`` (``load_hparams``), ``gguf-py/gguf/constants.py``
(``Keys``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qcut.checkpoints.formats.gguf.architectures import ARCHITECTURES, MIXTRAL, Architecture, Number
from qcut.checkpoints.formats.gguf.container import GgufModel
from qcut.checkpoints.huggingface import check_class, config_object, named_class
from qcut.errors import CheckpointError, UnsupportedError

_READ = (
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.factor", "rope.scaling.type", "vocab_size"),
)
_SCALING, _WINDOW = "rope.scaling.", "attention.sliding_window"
_DESCRIPTIONS = (f"{_SCALING}finetuned", f"{_SCALING}original_context_length")
"""Of rotations that are scaled by other types than those that are read, and of no influence on these."""
_BETAS = {f"{_SCALING}yarn_beta_fast": "beta_fast", f"{_SCALING}yarn_beta_slow": "beta_slow"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    _WINDOW: (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    f"{_SCALING}attn_factor": (1,),
    f"{_SCALING}yarn_attn_factor": (1,),
    f"{_SCALING}yarn_ext_factor": (0, -1),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""What an entry may hold that changes nothing, as writers put it there."""
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
"""Tensors that scale rotations, which configurations of transformers state."""
_MOST_FACTORS = 1 << 12
_COMPARED_ROTATION = frozenset({"factor", "long_factor", "partial_rotary_factor", "rope_theta", "short_factor"})
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ENDS = ("eos", "eot", "eom")
_NEEDS_CONFIG = "put the model's config.json next to the file"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_UNCOMPARED = frozenset(
    {
        *("architectures", "attention_bias", "bos_token_id", "eos_token_id", "max_position_embeddings", "mlp_bias"),
        *("model_type", "n_positions", "pad_token_id", "rope_parameters", "tie_word_embeddings", "vocab_size"),
        *("original_max_position_embeddings", "sliding_window"),
    }
)
"""Keys that a ``config.json`` may state otherwise: it may extend the context, and tensors decide others."""
_MOST_PARTS, _MOST, _LARGEST = 1 << 16, 1 << 24, 1e12
_KINDS = {int: "an int", float: "a float"}
_USUAL: dict[str, Callable[[Any], int]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "n_inner": lambda config: 4 * config.n_embd,
}
"""What families compute by if a configuration has None."""


def architecture_of(file: GgufModel) -> Architecture:
    """The architecture of a file.

    Raises:
        UnsupportedError: one that is not served, or no model.
    """
    data = file.metadata
    if (kind := data.get("general.type", "model")) != "model":
        raise UnsupportedError(f"{file.path}: general.type is {_short(kind)}; 'model' is served")
    name = data.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedError(
            f"{file.path}: general.architecture is {_short(name)}; {', '.join(ARCHITECTURES)} are served"
        )
    return MIXTRAL if name == "llama" and data.get("llama.expert_count", 0) else found


class Metadata:
    """The entries of a file's own architecture, as a configuration.

    Args:
        file: the file.
        architecture: its own.
        has_config: whether a ``config.json`` states what the file does not, such as scaled rotations; see `check`.

    Attributes:
        config: of the model, as JSON holds it; without ``rope_parameters`` where only a ``config.json`` states them.

    Raises:
        UnsupportedError: an entry that llama.cpp may compute by and qcut does not (named).
        CheckpointError: an entry is missing, or of another type.
    """

    def __init__(self, file: GgufModel, architecture: Architecture, has_config: bool = False) -> None:
        self._file, self._architecture, self._has_config = file, architecture, has_config
        self._where, self._data = file.path, file.metadata
        self._prefix = f"{self._data['general.architecture']}."
        self._read = {*_READ, *_DESCRIPTIONS, *architecture.numbers, *architecture.sizes} - architecture.neutral.keys()
        self._neutral = {**_NEUTRAL, **architecture.neutral}
        self.config: dict[str, Any] = {"model_type": architecture.model_type}
        self.config |= {"architectures": [architecture.class_name]}
        for key, number in architecture.numbers.items():
            default = None if number.default is None else number.default(self.config)
            optional = number.default is not None and default is None and not self._data.get(self._prefix + key)
            self.config[number.key] = None if optional else self._number(key, number, default)
        self.config |= architecture.fixed
        head = self._head()
        if architecture.rotation != "none" and (rope := self._rotation(head)) is not None:
            self.config["rope_parameters"] = rope
        size = self._vocabulary()
        self.config |= {
            "vocab_size": size,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            **self._tokens(size),
        }
        if architecture.model_type == "llama":
            self.config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
            self.config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if not has_config:
            self._refuse_others()

    def check(self, config: dict[str, Any], where: str) -> None:
        """Hold a ``config.json`` next to the file to the metadata, which it may extend.

        Args:
            config: as JSON holds it.
            where: its file, for messages.

        Raises:
            CheckpointError: both state a number, an activation or how positions are rotated, and not the same (named).
            UnsupportedError: another ``model_type``; or an entry that llama.cpp may compute by, and that the
                configuration does not state (named).
        """
        kinds, name = self._architecture.model_types or (self._architecture.model_type,), named_class(config, where)
        if (kind := check_class(name, where).config_class.model_type) not in kinds:
            raise UnsupportedError(
                f"{self._where}: general.architecture is {self._prefix[:-1]!r}; config.json next to it has the "
                f"model_type {kind!r}; allowed: {' or '.join(kinds)}, or no config.json"
            )
        stated = config_object(name, config, where)
        entries = {number.key: self._prefix + key for key, number in self._architecture.numbers.items()}
        for key, found in self.config.items():
            value = getattr(stated, key, None)
            if value is None and key in _USUAL:
                value = _USUAL[key](stated)
            if key not in _UNCOMPARED and not _same(found, value):
                self._contradicts(f"metadata {entries[key]}" if key in entries else key, found, value)
        rotations = self._check_rotation(getattr(stated, "rope_parameters", None) or {})
        found, value = self._data.get(f"{self._prefix}{_WINDOW}"), getattr(stated, "sliding_window", None)
        if _WINDOW in self._architecture.numbers and found and found != value:
            self._contradicts(f"metadata {self._prefix}{_WINDOW}", found, value)
        self._neutral[_WINDOW] = (0, value)
        self._refuse_others(but=_SCALING if rotations != "default" else None)

    def _check_rotation(self, stated: Mapping[str, Any]) -> str:
        """Compare how positions are rotated; returns the type that ``config.json`` has."""
        if self._architecture.rotation == "none":
            return "default"
        found = self.config.get("rope_parameters")
        if self._architecture.rotation == "local":
            pairs = [(found and found[layers], stated.get(layers) or {}) for layers in _LAYER_TYPES]
        else:
            pairs = [(found, stated)]
        for own, its in pairs:
            kind = its.get("rope_type", "default")
            if own is None:
                if kind in ("default", "linear"):
                    raise UnsupportedError(
                        f"{self._where}: {self._unread_scaling()}; config.json has rotations of type {kind!r}; "
                        f"{_NEEDS_CONFIG}"
                    )
                continue
            for key in _COMPARED_ROTATION & own.keys():
                if key == "rope_theta" and not self._states("rope.freq_base"):
                    continue
                value = its.get(key, 1.0 if key == "partial_rotary_factor" else None)
                if not _same(own[key], value):
                    self._contradicts(self._entry_of(key), own[key], value)
            if own["rope_type"] not in ("default", kind):
                self._contradicts(self._entry_of("rope_type"), own["rope_type"], kind)
        return str(pairs[0][1].get("rope_type", "default"))

    def _entry_of(self, key: str) -> str:
        names = {"rope_theta": "rope.freq_base", "factor": f"{_SCALING}factor", "rope_type": f"{_SCALING}type"}
        return f"metadata {self._prefix}{names[key]}" if key in names else key

    def _contradicts(self, what: str, found: Any, value: Any) -> None:
        raise CheckpointError(
            f"{self._where}: {what}: found {_short(found)}; config.json next to it has {_short(value)}; allowed: the "
            "same in both, or no config.json"
        )

    def _states(self, key: str) -> bool:
        return f"{self._prefix}{key}" in self._data

    def _number(self, key: str, number: Number, default: Any = None) -> Any:
        """A number above 0, or a truth value."""
        value: Any = self._data.get(f"{self._prefix}{key}", default)
        most = _LARGEST if number.kind is float else _MOST_PARTS if "count" in key else _MOST
        if type(value) is not number.kind or (number.kind is not bool and not 0 < value + number.or_zero <= most):
            above = "from" if number.or_zero else "above"
            what = "a bool" if number.kind is bool else f"{_KINDS[number.kind]} {above} 0, at most {most},"
            raise CheckpointError(
                f"{self._where}: metadata {self._prefix}{key}: found {_short(value)}; {what} is needed"
            )
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value: int = self._number(key, Number(""), default)
        return value

    def _head(self) -> int:
        """Columns of a head, which keys and values share."""
        width, heads = self._int("embedding_length"), self._int("attention.head_count")
        if (kv := "attention.head_count_kv") not in self._architecture.numbers:
            self._neutral[kv] = (heads,)
        head = self._int("attention.key_length", width // heads or None)
        if (values := self._int("attention.value_length", head)) != head:
            raise UnsupportedError(
                f"{self._where}: keys of {head} and values of {values} columns a head; equal ones are served"
            )
        if "num_key_value_heads" in self.config:
            self.config["head_dim"] = head
        elif head * heads != width:
            raise UnsupportedError(
                f"{self._where}: metadata {self._prefix}attention.key_length: found {head}; allowed: {width / heads:g}"
            )
        scalar = head
        if self._architecture.wide is not None:
            scalar = width // heads if self._int("block_count") == self._architecture.wide else head
            self.config["query_pre_attn_scalar"] = scalar
        self._neutral["attention.scale"] = (0, _float32(1 / math.sqrt(scalar)))
        return head

    def _rotation(self, head: int) -> dict[str, Any] | None:
        """``rope_parameters``; None if only a ``config.json`` can state them."""
        rotated = self._int("rope.dimension_count", head)
        base: float = self._number("rope.freq_base", Number("", float), 10000.0)
        scaling = self._scaling(base, rotated)
        kind = self._architecture.rotation
        if kind != "part" and rotated != head:
            raise UnsupportedError(
                f"{self._where}: {rotated} of {head} dimensions of a head are rotated; all are served"
            )
        if scaling is None:
            if not self._has_config:
                raise UnsupportedError(f"{self._where}: {self._unread_scaling()}: scaled rotations; {_NEEDS_CONFIG}")
            return None
        rope = {"rope_theta": base, **scaling}
        if kind == "local":
            self._read.add("rope.freq_base_swa")
            local: float = self._number("rope.freq_base_swa", Number("", float), 10000.0)
            return dict(zip(_LAYER_TYPES, (rope, {"rope_type": "default", "rope_theta": local}), strict=True))
        return {**rope, "partial_rotary_factor": rotated / head} if kind == "part" else rope

    def _unread_scaling(self) -> str:
        factors = [name for name in FACTORS if name in self._file.tensors]
        kind = self._data.get(f"{self._prefix}{_SCALING}type")
        return factors[0] if factors else f"{self._prefix}{_SCALING}type {_short(kind)}"

    def _scaling(self, base: float, rotated: int) -> dict[str, Any] | None:
        """How rotations are scaled; None if only a ``config.json`` can state that.

        A factor without a type is linear, as llama.cpp reads it, and one of type none is not used. The factor's older
        name counts if the newer one is missing.
        """
        kind = self._data.get(f"{self._prefix}{_SCALING}type", "linear")
        factor, factors = self._factor(), [name for name in FACTORS if name in self._file.tensors]
        if factors and factor in (0, 1):
            if kind in ("linear", "none", "longrope") and {*factors} == {LONG, SHORT}:
                return self._by_length(rotated)
            return self._llama3(base, rotated) if kind in ("linear", "none") and factors == [FREQUENCIES] else None
        if factors:
            return None
        if kind == "yarn" and factor and self._states(f"{_SCALING}original_context_length"):
            self._read |= _BETAS.keys()
            betas = {name: self._number(key, Number("", float)) for key, name in _BETAS.items() if self._states(key)}
            length = self._int(f"{_SCALING}original_context_length")
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length} | {
                **betas,
                **self._architecture.yarn,
            }
        if kind not in ("linear", "none"):
            return None
        if kind == "linear" and factor not in (0, 1):
            return {"rope_type": "linear", "factor": factor}
        return {"rope_type": "default"}

    def _factor(self) -> float:
        for key in (f"{_SCALING}factor", "rope.scale_linear"):
            if self._states(key):
                factor = self._data[self._prefix + key]
                if type(factor) not in (int, float) or not 0 <= factor < 1 << 24:
                    raise CheckpointError(
                        f"{self._where}: metadata {self._prefix}{key}: found {_short(factor)}; a number from 0 is "
                        "needed"
                    )
                return float(factor)
        return 0.0

    def _llama3(self, base: float, rotated: int) -> dict[str, Any] | None:
        """The scaling of Llama 3.1 and later, if it gives the factors that the file has."""
        found = self._factors(FREQUENCIES, rotated // 2)
        factor = float(found.max())
        same = torch.allclose(found, _llama3_factors(base, rotated, factor), rtol=1e-4, atol=0)
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3} if same else None

    def _by_length(self, rotated: int) -> dict[str, Any]:
        """Factors for contexts up to the original length, and for longer ones."""
        length = self._int(f"{_SCALING}original_context_length")
        longer = max(self._int("context_length") / length, 1.0)
        factor = math.sqrt(1 + math.log(longer) / math.log(length)) if length > 1 else 1.0
        stated = self._data.get(f"{self._prefix}{_SCALING}attn_factor", factor)
        if not _same(stated, factor, 1e-4):
            raise UnsupportedError(
                f"{self._where}: metadata {self._prefix}{_SCALING}attn_factor: found {_short(stated)}; allowed: "
                f"{factor:.6g}, by the lengths of the contexts"
            )
        self._read |= {f"{_SCALING}attn_factor"}
        self.config["original_max_position_embeddings"] = length
        return {
            "rope_type": "longrope",
            "long_factor": self._factors(LONG, rotated // 2).tolist(),
            "short_factor": self._factors(SHORT, rotated // 2).tolist(),
            "original_max_position_embeddings": length,
        }

    def _factors(self, name: str, count: int) -> Tensor:
        place = self._file.tensors[name]
        if place.kind != "F32" or place.shape != (count,) or not 0 < count <= _MOST_FACTORS:
            raise CheckpointError(
                f"{self._where}: tensor {name!r}: found {place.kind} {list(place.shape)}; F32 [{count}], at most "
                f"[{_MOST_FACTORS}], is needed"
            )
        factors = self._file.read(name)
        if not bool((factors > 0).all() & factors.isfinite().all()):
            wrong = factors[~((factors > 0) & factors.isfinite())][0]
            raise CheckpointError(
                f"{self._where}: tensor {name!r}: found {float(wrong)}; finite factors above 0 are needed"
            )
        return factors

    def _vocabulary(self) -> int:
        tokens, table = self._data.get("tokenizer.ggml.tokens"), self._file.tensors.get("token_embd.weight")
        if table is not None:
            return table.shape[0]
        return len(tokens) if isinstance(tokens, list) else self._int("vocab_size")

    def _tokens(self, size: int) -> dict[str, Any]:
        found: dict[str, int | None] = {}
        for name in ("bos", "padding", *_ENDS):
            token = found[name] = self._data.get(f"tokenizer.ggml.{name}_token_id")
            if token is not None and (type(token) is not int or not 0 <= token < size):
                raise CheckpointError(
                    f"{self._where}: metadata tokenizer.ggml.{name}_token_id: found {_short(token)}; allowed: 0 to "
                    f"{size - 1}"
                )
        ends = list(dict.fromkeys(found[name] for name in _ENDS if found[name] is not None))
        end = ends if len(ends) > 1 else ends[0] if ends else None
        return {"bos_token_id": found["bos"], "eos_token_id": end, "pad_token_id": found["padding"]}

    def _refuse_others(self, but: str | None = None) -> None:
        """Refuse entries of the architecture that are not read and hold something."""
        for key, value in self._data.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in self._read or (but and name.startswith(but)):
                continue
            allowed = self._neutral.get(name, ())
            if not any(type(value) in (bool, int, float, str) and value == one for one in allowed):
                what = " or ".join(map(repr, allowed)) or "no such entry"
                raise UnsupportedError(
                    f"{self._where}: metadata {key}: found {_short(value)}, which llama.cpp may compute by; allowed: "
                    f"{what}"
                )


def _llama3_factors(base: float, rotated: int, factor: float) -> Tensor:
    """What each frequency is divided by, float32 ``[rotated / 2]``."""
    low, high, length = _LLAMA3.values()
    waves = 2 * math.pi * base ** (torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated)
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(waves > length / low, factor, torch.where(waves < length / high, 1.0, between))
    return factors.float()


def _same(found: Any, value: Any, tolerance: float = 1e-6) -> bool:
    if type(found) in (int, float) and type(value) in (int, float):
        return math.isclose(found, value, rel_tol=tolerance)  # metadata have float32
    if isinstance(found, list) and isinstance(value, list):
        return len(found) == len(value) and all(map(_same, found, value))
    if type(found) is int and isinstance(value, list) and value:  # one number for each layer
        return all(_same(found, one) for one in value)
    return bool(found == value)


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else f"{value!r:.80}"
