"""The tensors of a model as checkpoints hold them: each once, those of quantized layers in the order of their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from qcut.errors import CheckpointError
from qcut.layers.linear import Linear
from qcut.layers.parallel import refuse_parts
from qcut.layers.stored import StateEntry
from qcut.models.modules import has_extra_state


def stored_tensors(model: nn.Module) -> tuple[dict[str, StateEntry], dict[str, str]]:
    """Every parameter and buffer once, and the names of tied ones with the name they are stored under.

    Raises:
        CheckpointError: a tensor outside quantized layers is on the meta device, or a module has extra state (named).
        UnsupportedError: a layer is a part of one that is cut across processes (named).
    """
    refuse_parts(model, "saving")
    for name, module in model.named_modules():
        if has_extra_state(module):
            raise CheckpointError(
                f"module {name!r} ({type(module).__name__}) has extra state (get_extra_state), which files of tensors "
                "do not hold; keep it in a buffer, or in a file of your own"
            )
    tensors: dict[str, StateEntry] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in _named_tensors(model):
        owner = seen.setdefault(tensor.identity, name)
        if owner == name:
            tensors[name] = tensor
        else:
            tied[name] = owner
    return tensors, tied


def passing_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that are not part of the state dict."""
    modules = model.named_modules(remove_duplicate=False)
    return {f"{name}.{key}" if name else key for name, m in modules for key in m._non_persistent_buffers_set}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, StateEntry]]:
    """Parameters first, then buffers, those of quantized layers as the layers store them."""
    modules = [(f"{name}." if name else "", m) for name, m in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        if not isinstance(module, Linear):
            yield from ((prefix + key, tensor) for key, tensor in _plain(module._parameters, prefix).items())
    for prefix, module in modules:
        stored = module.stored() if isinstance(module, Linear) else _plain(module._buffers, prefix)
        yield from ((prefix + key, tensor) for key, tensor in stored.items())


def _plain(tensors: Mapping[str, Tensor | None], prefix: str) -> dict[str, StateEntry]:
    held = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    for key, tensor in held.items():
        if tensor.is_meta:
            raise CheckpointError(f"{prefix}{key}: the tensor is on the meta device and has no values to save")
    return {key: StateEntry.of(tensor) for key, tensor in held.items()}


def shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names of tensors by file, in order: a file takes tensors until their bytes would exceed the limit."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > limit:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
