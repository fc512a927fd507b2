"""What ``save_pretrained`` writes of a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from qcut.checkpoints.description import (
    Description,
    passing_buffers,
    quantization_config,
    refuse_own_ties,
    stored_tensors,
)
from qcut.checkpoints.marks import mark
from qcut.errors import UnsupportedError
from qcut.integrations.transformers.config import QcutConfig
from qcut.layers.experts.opening import PROJECTIONS


def describe(model: Any) -> None:
    """Bring the configuration of a model up to date with the layers that the model has now.

    Raises:
        CheckpointError: the model shares what its class does not; see `refuse_own_ties`.
    """
    _, tied = stored_tensors(model)
    refuse_own_ties(model, tied)
    described = quantization_config(model, tied)
    for spec in described.get("experts", {}).values():
        from qcut.checkpoints.expert_tensors import hub_names  # most models have none

        spec["pieces"] = hub_names(model, spec["gating"].get("gated", True))
    config = QcutConfig.describing(described)
    model.config.quantization_config = config
    model.hf_quantizer.quantization_config = config


def state_of(model: Any, original_names: bool = False) -> dict[str, Tensor]:
    """The tensors to save, by name, tied ones once; those of experts under the names that the configuration states.

    Args:
        model: with quantized layers, that `describe` knows.
        original_names: whether transformers is to turn them into those of the family's first checkpoints.

    Raises:
        UnsupportedError: that would cut or join tensors of quantized layers.
    """
    tensors, tied = stored_tensors(model)
    passing = passing_buffers(model)
    described = Description.of(model, tied)
    pieces = _pieces(model, tensors)
    state: dict[str, Tensor] = {}
    for name, entry in tensors.items():
        if name in pieces:
            state |= pieces[name]
        elif name not in passing:
            state[name] = entry.read().detach()
    whole = mark(described.layers, described.embeddings, described.experts) | state
    modules = {*described.layers, *described.embeddings}
    quantized = {key for found in pieces.values() for key in found}
    quantized |= {name for name in whole if name.rpartition(".")[0] in modules}
    if original_names:
        _refuse_conversion(model, {name: whole[name] for name in quantized})
    return whole


def _pieces(model: Any, tensors: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """By the name of each stored tensor of a stack of experts, its pieces by name."""
    stacks = {
        f"{name}.{part}": spec["pieces"][part]
        for name, spec in model.config.quantization_config.stored.get("experts", {}).items()
        for part in PROJECTIONS
    }
    found: dict[str, dict[str, Tensor]] = {}
    keys: dict[str, list[str]] = {}
    for name in tensors:
        stack, _, key = name.rpartition(".")
        if stack in stacks:
            keys.setdefault(stack, []).append(key)
    for stack, names in keys.items():
        from qcut.checkpoints.expert_tensors import split

        experts = stack.rpartition(".")[0]
        found |= {f"{stack}.{key}": {} for key in names}
        for name, tensor in split(model.get_submodule(stack), stacks[stack], names):
            found[f"{stack}.{name.rpartition('.')[2]}"][f"{experts}.{name}"] = tensor
    return found


def _refuse_conversion(model: Any, quantized: dict[str, Tensor]) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    try:
        kept = {id(tensor) for tensor in revert_weight_conversion(model, dict(quantized)).values()}
    except Exception:  # whatever operations on float weights do with others
        kept = set()
    if not kept.issuperset(map(id, quantized.values())):
        raise UnsupportedError(
            f"save_pretrained would turn the tensors of a {type(model).__name__} into those of its first checkpoints, "
            "which cuts or joins quantized ones; allowed: save_original_format=False, or qcut.save"
        )
