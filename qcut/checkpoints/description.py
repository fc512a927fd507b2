"""What a checkpoint says of a model's quantized modules, and the modules without memory that this describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qcut.checkpoints.skeleton import activation_parent, empty_embedding, empty_layer
from qcut.common import schema
from qcut.errors import CheckpointError
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.models.fusion import fuse, fused_activations, key_before
from qcut.models.modules import WEIGHT_DTYPES, dtype_name, replace_modules
from qcut.numerics.plain_state import in_plain_state
from qcut.schemes import ACTIVATIONS

_LAYER = schema.record(
    {
        "scheme": schema.anything(),
        "in_features": schema.integer(1),
        "out_features": schema.integer(1),
        "bias": schema.boolean(),
        "activation": schema.text(choices=ACTIVATIONS),
    }
)
_EMBEDDING = schema.record({"table": schema.text(), "dtype": schema.text(choices=[*map(dtype_name, WEIGHT_DTYPES)])})

LAYERS = schema.table(_LAYER)
EMBEDDINGS = schema.table(_EMBEDDING)
FUSED = schema.table(schema.text(choices=ACTIVATIONS))
TIED = schema.table(schema.text())


class Description(NamedTuple):
    """A model's quantized modules as plain data.

    Attributes:
        layers: by name, the scheme, sizes, bias and activation of each `qcut.Linear`.
        embeddings: by name, the layer that each `qcut.Embedding` reads, its own or the classifier's, and its dtype.
        fused: activations that layers compute, by the name of the activation's module.
        tied: tensors that are stored under another name, with that name.
    """

    layers: dict[str, Any]
    embeddings: dict[str, Any]
    fused: dict[str, str]
    tied: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, tied: Mapping[str, str]) -> Description:
        """Describe a model.

        Raises:
            CheckpointError: an embedding is tied to a layer that is not in the model.
        """
        layers = {name: _describe(m) for name, m in model.named_modules() if isinstance(m, Linear)}
        return cls(layers, _embeddings(model), fused_activations(model), dict(tied))


def _describe(layer: Linear) -> dict[str, Any]:
    return {
        "scheme": layer.scheme.to_json(),
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias is not None,
        "activation": layer.activation,
    }


def _embeddings(model: nn.Module) -> dict[str, dict[str, str]]:
    layers = {id(m): name for name, m in model.named_modules() if isinstance(m, Linear)}
    described = {}
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            if id(module.linear) not in layers:
                raise CheckpointError(f"{name}: the embedding is tied to a layer that is not in the model")
            described[name] = {"table": layers[id(module.linear)], "dtype": dtype_name(module.dtype)}
    return described


class Skeleton(NamedTuple):
    """Modules that take the place of a model's: quantized layers and embeddings, and activations that layers apply.

    Attributes:
        layers: every quantized layer by name, tables of embeddings included.
        modules: what replaces modules of the model: layers, and embeddings with their tables.
        activations: the parent of each activation's module, and the activation's name.
    """

    layers: dict[str, Linear]
    modules: dict[str, nn.Module]
    activations: dict[str, tuple[nn.Module, str]]

    def put_into(self, model: nn.Module) -> None:
        """Replace the model's modules."""
        replace_modules(model, {id(model.get_submodule(name)): new for name, new in self.modules.items()})
        for name, (parent, activation) in self.activations.items():
            key = name.rpartition(".")[2]
            fuse(parent, key, parent._modules.get(key_before(parent, key)), activation).apply()


def skeleton_of(saved: Description, model: nn.Module, dtype: torch.dtype | None, path: Path) -> Skeleton:
    """Quantized modules without memory, checked against those of the model that they replace.

    Args:
        saved: the description.
        model: what it describes, in float.
        dtype: that embeddings return; None takes theirs.
        path: the file that holds the description, for messages.

    Raises:
        CheckpointError: a layer, embedding or activation is not in the model, or of another size.
    """
    own_tables = {f"{name}.table": name for name in saved.embeddings}
    layers = {name: empty_layer(name, spec, model, own_tables.get(name), path) for name, spec in saved.layers.items()}
    modules: dict[str, nn.Module] = {name: layer for name, layer in layers.items() if name not in own_tables}
    for name, spec in saved.embeddings.items():
        modules[name] = empty_embedding(name, spec, layers, model, dtype, path)
    parents = {name: activation_parent(name, model, saved.layers, path) for name in saved.fused}
    return Skeleton(layers, modules, {name: (parent, saved.fused[name]) for name, parent in parents.items()})


@in_plain_state
def fill_layer(layer: Linear, state: dict[str, Tensor], where: str) -> None:
    """Give a layer the tensors of its state dict, through its own door, which may lay tensors out anew.

    Raises:
        CheckpointError: the layer refuses a shape, dtype or value.
    """
    try:
        layer.load_state_dict(state, assign=True)
    except RuntimeError as exc:
        raise CheckpointError(f"{where}: {exc}") from exc


def tie_layers(modules: Mapping[str, nn.Module], tied: Mapping[str, str]) -> None:
    """Let quantized layers whose tensors were stored under another's name hold that layer's tensors."""
    pairs = {}
    for name, owner in tied.items():
        layer, other = (modules.get(full.rpartition(".")[0]) for full in (name, owner))
        if layer is not other and isinstance(layer, Linear) and isinstance(other, Linear):
            pairs[id(layer)] = layer, other
    for layer, other in pairs.values():
        layer.tie_to(other)
