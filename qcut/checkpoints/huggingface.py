"""Builds models of transformers from configurations of checkpoints; no configuration is trusted."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from qcut.common import versions
from qcut.errors import CheckpointError

_HEADS = (
    *("", "FOR_PRETRAINING_", "FOR_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_"),
    *("FOR_SPEECH_SEQ_2_SEQ_", "FOR_IMAGE_TEXT_TO_TEXT_", "FOR_MULTIMODAL_LM_", "FOR_TEXT_ENCODING_", "FOR_IMAGE_"),
    *("FOR_SEQUENCE_CLASSIFICATION_", "FOR_TOKEN_CLASSIFICATION_", "FOR_QUESTION_ANSWERING_", "FOR_MULTIPLE_CHOICE_"),
    *("FOR_NEXT_SENTENCE_PREDICTION_", "FOR_MASKED_IMAGE_MODELING_", "FOR_IMAGE_CLASSIFICATION_"),
    *("FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_", "FOR_VIDEO_CLASSIFICATION_", "FOR_VISUAL_QUESTION_ANSWERING_"),
    *("FOR_AUDIO_CLASSIFICATION_", "FOR_AUDIO_FRAME_CLASSIFICATION_", "FOR_AUDIO_XVECTOR_", "FOR_CTC_"),
)
"""Causal, encoder and encoder-decoder models, and those for usual tasks, by the names of transformers' tables
``MODEL_…MAPPING_NAMES``."""

_LOADING_ONLY = {
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "custom_generate",
    "name_or_path",
    "transformers_version",
    "trust_remote_code",
}
"""Keys that say where a model came from or which code to fetch for it: of no influence on a class named outright."""

_ELSEWHERE = {
    "backbone",
    "compression_config",
    "quantization_config",
    "use_kernels",
    "use_pretrained_backbone",
    "use_timm_backbone",
}
"""Keys that bring in weights or code from elsewhere, unless they are empty or false."""

_QUANTIZATION = ("compression_config", "quantization_config")
"""Keys with empty values that transformers takes for a configuration."""

_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
_ATTENTIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations that torch itself has. Others may be fetched from a hub, as code."""

_LARGEST = 1 << 24
"""Largest whole number: beyond any vocabulary and any context, except where it is a base of angles."""

_COUNTED = ("layer", "depth", "block", "stage", "expert", "head", "label", "group")
_MOST_PARTS = 1 << 16
"""Most layers, heads, … of a kind. Also most modules and tensors of a model if the number of stored tensors is
unknown."""

_BUFFER_BYTES = 1 << 30
"""Bytes of buffers that a model may compute, such as masks and angles of positions, next to one a stored value."""

_DEPTH = 16
_MOST_VALUES = 1 << 16
"""Values of a configuration: more than the names of 21,000 classes, in both directions."""


def model_of(name: Any, config: Any, where: str, *, tensors: int | None = None, generation: Any = None) -> nn.Module:
    """Build a model of a class of transformers, on torch's current device, with random values.

    Args:
        name: of the class: a causal, encoder or encoder-decoder model, or one with a head for a usual task.
        config: its configuration, as JSON holds it.
        where: the file, for messages.
        tensors: number of tensors that the checkpoint holds, which bounds the number of modules that are made.
        generation: configuration of generation, as JSON holds it, or None.

    Raises:
        CheckpointError: another class, or a configuration that names code, weights or kernels from elsewhere, that has
            impossible numbers, asks for more tensors than there are, or does not fit the class.
        UnsupportedError: transformers is missing or too old.
    """
    cls = check_class(name, where)
    own = config_object(name, config, where)
    given = None if generation is None else plain_config(generation, where, "generation_config")
    try:
        with _at_most(_MOST_PARTS if tensors is None else 8 * tensors + 1024, where):
            model: nn.Module = cls(own)
        if given is not None:
            model.generation_config = versions.transformers().GenerationConfig.from_dict(given)
        return model
    except CheckpointError:
        raise
    except Exception as exc:  # whatever a configuration of wrong types makes the class do
        raise CheckpointError(f"{where}: {name} cannot be built from the saved configuration: {exc}") from exc


def config_object(name: Any, config: Any, where: str) -> Any:
    """The configuration of a class of transformers; arguments and errors as `model_of`."""
    cls = check_class(name, where)
    plain = plain_config(config, where)
    try:
        return cls.config_class.from_dict(_with_floats(plain))
    except Exception as exc:  # whatever wrong types make the class do
        raise CheckpointError(f"{where}: {name} cannot be built from the saved configuration: {exc}") from exc


def check_class(name: Any, where: str) -> Any:
    """The class of transformers that a checkpoint names.

    Raises:
        CheckpointError: it is none of the models that `model_of` builds.
        UnsupportedError: transformers is missing or too old.
    """
    transformers = versions.transformers()
    if not isinstance(name, str) or name not in _class_names():
        raise CheckpointError(
            f"{where}: found model class {name!r}; a model class of transformers is needed: a causal, encoder or "
            "encoder-decoder model"
        )
    return getattr(transformers, name)


def causal_class(config: Mapping[str, Any], where: str) -> str:
    """Name of the causal language model that transformers itself has for a configuration's ``model_type``.

    Raises:
        CheckpointError: there is none.
        UnsupportedError: transformers is missing or too old.
    """
    versions.transformers()
    from transformers.models.auto import modeling_auto

    kind = config.get("model_type")
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise CheckpointError(
            f"{where}: model_type is {_short(kind)}; transformers has no causal language model of that type"
        )
    return str(name)


def named_class(config: Mapping[str, Any], where: str) -> str:
    """The one name under ``architectures``, which may be no class; without one, see `causal_class`."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 else causal_class(config, where)


def is_causal_name(name: str) -> bool:
    """Whether a class is a causal language model, by its name."""
    return name.endswith(("ForCausalLM", "LMHeadModel"))


def stated_class(config: Mapping[str, Any], where: str) -> str:
    """Name of the class that a configuration states under ``architectures``, a model for any task.

    Where it states none, or a causal language model that transformers does not have under that name, the class is that
    of `causal_class`.

    Raises:
        CheckpointError: it states another class that transformers does not have, or several; or see `causal_class`.
        UnsupportedError: transformers is missing or too old.
    """
    versions.transformers()
    names = config.get("architectures")
    one = names[0] if isinstance(names, list) and len(names) == 1 else names
    if isinstance(one, str) and one in _class_names():
        return one
    if not one or (isinstance(one, str) and is_causal_name(one)):
        return causal_class(config, where)
    raise CheckpointError(f"{where}: architectures is {_short(names)}; one model class of transformers is needed")


def plain_config(config: Any, where: str, key: str = "config") -> dict[str, Any]:
    """A configuration without what matters only to loading.

    Args:
        config: as JSON holds it.
        where: the file, for messages.
        key: name of the configuration, for messages.

    Raises:
        CheckpointError: it names code, weights or kernels from elsewhere, or has impossible numbers; the message names
            the key and its value.
    """
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: {key} is a {type(config).__name__}; an object is needed")
    if (count := _count(config)) > _MOST_VALUES:
        raise CheckpointError(f"{where}: {key} has {count} values or more; allowed: {_MOST_VALUES}")
    plain: dict[str, Any] = _plain(config, where, key, 0)
    return plain


def _count(value: Any) -> int:
    """Values in an object or list, those of the objects and lists in it included; counting ends beyond the most."""
    count, todo = 0, [value]
    while todo and count <= _MOST_VALUES:
        one = todo.pop()
        inner = one.values() if isinstance(one, dict) else one
        count += len(inner)
        todo += [each for each in inner if isinstance(each, (dict, list))]
    return count


def _plain(value: Any, where: str, key: str, depth: int) -> Any:
    if depth > _DEPTH:
        raise CheckpointError(f"{where}: {key[:80]}… is nested more than {_DEPTH} deep")
    name = key.rpartition(".")[2]
    if name in _ELSEWHERE and value:
        raise CheckpointError(f"{where}: {key} is {_short(value)}, which is loaded from elsewhere; allowed: none")
    if name == "model_type" and isinstance(value, str) and value.startswith("timm"):
        raise CheckpointError(f"{where}: {key} is {value!r}, a model of another library; allowed: transformers' own")
    if name in _ATTENTION:
        for one in value.values() if isinstance(value, dict) else (value,):
            if one is not None and one not in _ATTENTIONS:
                raise CheckpointError(f"{where}: {key} is {_short(one)}; allowed: {', '.join(_ATTENTIONS)}")
    if isinstance(value, int) and not isinstance(value, bool):
        counted = any(word in name for word in _COUNTED) and "size" not in name
        most = _MOST_PARTS if counted else _LARGEST
        if abs(value) > most and not any(word in name for word in ("theta", "base", "label2id")):
            raise CheckpointError(f"{where}: {key} is {_short(value)}; allowed: at most {most}")
    for fits, allows, allowed in _KINDS:
        if fits(name) and not allows(value):
            raise CheckpointError(f"{where}: {key} is {_short(value)}; allowed: {allowed}")
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if k not in _LOADING_ONLY and (v or k not in _QUANTIZATION)}
        return {k: _plain(v, where, f"{key}.{k}", depth + 1) for k, v in kept.items()}
    if isinstance(value, list):
        return [_plain(item, where, key, depth + 1) for item in value]
    return value


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is not int or value >= least


_KINDS: tuple[tuple[Callable[[str], bool], Callable[[Any], bool], str], ...] = (
    (
        frozenset({"output_attentions", "output_hidden_states", "return_dict", "use_cache"}).__contains__,
        lambda value: type(value) is bool,
        "true or false",
    ),
    (
        lambda name: name.endswith(("_eps", "_epsilon")),
        lambda value: value is None or (type(value) in (int, float) and 0 <= value < math.inf),
        "finite numbers from 0",
    ),
    (
        frozenset({"sliding_window"}).__contains__,
        lambda value: value is None or (type(value) is int and value >= 0),
        "null, or whole numbers from 0",
    ),
    (
        frozenset({"n_head", "num_attention_heads", "num_heads", "num_key_value_heads"}).__contains__,
        _whole(1),
        "whole numbers from 1",
    ),
    (lambda name: name.startswith(("n_", "num_")), _whole(0), "whole numbers from 0"),
)
"""What classes of transformers take as it is, and fail by in the first forward: names, values and what is allowed."""


def _with_floats(data: Any) -> Any:
    """A configuration with infinities in place of ``{"__float__": "Infinity"}``, as transformers writes them."""
    if isinstance(data, dict):
        if data.keys() == {"__float__"} and isinstance(data["__float__"], str):
            return float(data["__float__"])
        return {key: _with_floats(value) for key, value in data.items()}
    return [_with_floats(value) for value in data] if isinstance(data, list) else data


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not print a whole number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _class_names() -> set[str]:
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for head in _HEADS:
        # A table that this version does not have allows nothing.
        for value in getattr(modeling_auto, f"MODEL_{head}MAPPING_NAMES", {}).values():
            names.update((value,) if isinstance(value, str) else value)
    return names


@contextlib.contextmanager
def _at_most(parts: int, where: str) -> Iterator[None]:
    """Stop this thread from making more modules, parameters and buffers than that."""
    count, thread = 0, threading.get_ident()

    def made(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > parts:
            raise CheckpointError(
                f"{where}: the configuration needs a model of more than {parts} modules and tensors, many more than "
                "the checkpoint has"
            )

    with contextlib.ExitStack() as stack:
        for register in (
            registration.register_module_module_registration_hook,
            registration.register_module_parameter_registration_hook,
            registration.register_module_buffer_registration_hook,
        ):
            stack.callback(register(made).remove)
        yield


def skeleton_model(
    name: str, config: dict[str, Any], where: str, shapes: Collection[Sequence[int]] | None = None
) -> nn.Module:
    """A model of a class of transformers on the meta device: its sizes, without memory.

    Args:
        name: see `model_of`.
        config: see `model_of`.
        where: see `model_of`.
        shapes: of the tensors that the checkpoint holds, which bound the number of modules, and the memory of buffers
            that the model computes; None: no bounds.

    Raises:
        CheckpointError, UnsupportedError: see `model_of`; or buffers beyond the bound (the largest is named).
    """
    with torch.device("meta"):
        model = model_of(name, config, where, tensors=None if shapes is None else len(shapes))
    sizes = {name: buffer.nbytes for name, buffer in model.named_buffers()}
    if shapes is not None and sum(sizes.values()) > (most := _BUFFER_BYTES + sum(map(math.prod, shapes))):
        largest = max(sizes, key=sizes.__getitem__)
        raise CheckpointError(
            f"{where}: the configuration needs {sum(sizes.values())} bytes of buffers; the largest is {largest!r}, "
            f"{list(model.get_buffer(largest).shape)}; allowed: {most}, by the values that the checkpoint has"
        )
    return model


def causal_model(config: dict[str, Any], where: str) -> nn.Module:
    """The causal language model of a configuration on the meta device.

    Raises:
        CheckpointError, UnsupportedError: see `model_of` and `causal_class`.
    """
    return skeleton_model(causal_class(config, where), config, where)
