"""What ``save_pretrained`` writes of a quantized model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcut.checkpoints.description import Description
from qcut.checkpoints.marks import mark
from qcut.checkpoints.quantization_config import quantization_config
from qcut.checkpoints.state import passing_buffers, stored_tensors
from qcut.integrations.transformers.config import QcutConfig


def describe(model: Any) -> None:
    """Bring the configuration of a model up to date with the layers that the model has now."""
    _, tied = stored_tensors(model)
    config = QcutConfig.describing(quantization_config(model, tied))
    model.config.quantization_config = config
    model.hf_quantizer.quantization_config = config


def state_of(model: Any) -> dict[str, Tensor]:
    """The tensors to save, by name, tied ones once."""
    tensors, tied = stored_tensors(model)
    passing = passing_buffers(model)
    described = Description.of(model, tied)
    state = {name: entry.read().detach() for name, entry in tensors.items() if name not in passing}
    return mark(described.layers, described.embeddings) | state
