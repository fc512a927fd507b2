"""What ``save_pretrained`` writes of a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from qcut.checkpoints.description import Description, passing_buffers, quantization_config, stored_tensors
from qcut.checkpoints.marks import mark
from qcut.errors import UnsupportedError
from qcut.integrations.transformers.config import QcutConfig


def describe(model: Any) -> None:
    """Bring the configuration of a model up to date with the layers that the model has now."""
    _, tied = stored_tensors(model)
    config = QcutConfig.describing(quantization_config(model, tied))
    model.config.quantization_config = config
    model.hf_quantizer.quantization_config = config


def state_of(model: Any, original_names: bool = False) -> dict[str, Tensor]:
    """The tensors to save, by name, tied ones once.

    Args:
        model: with quantized layers.
        original_names: whether transformers is to turn them into those of the family's first checkpoints.

    Raises:
        UnsupportedError: that would cut or join tensors of quantized layers.
    """
    tensors, tied = stored_tensors(model)
    passing = passing_buffers(model)
    described = Description.of(model, tied)
    state = {name: entry.read().detach() for name, entry in tensors.items() if name not in passing}
    whole = mark(described.layers, described.embeddings) | state
    if original_names:
        _refuse_conversion(model, whole, (*described.layers, *described.embeddings))
    return whole


def _refuse_conversion(model: Any, state: dict[str, Tensor], modules: Iterable[str]) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    names = set(modules)
    quantized = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in names}
    try:
        kept = {id(tensor) for tensor in revert_weight_conversion(model, dict(quantized)).values()}
    except Exception:  # whatever operations on float weights do with others
        kept = set()
    if not kept.issuperset(map(id, quantized.values())):
        raise UnsupportedError(
            f"save_pretrained would turn the tensors of a {type(model).__name__} into those of its first checkpoints, "
            "which cuts or joins quantized ones; allowed: save_original_format=False, or qcut.save"
        )
