"""Changes a model all at once or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qcut.models.fusion import Change, fuse, key_before


def commit(changes: Iterable[Change], check: Callable[[], object] = lambda: None) -> None:
    """Makes all changes in order, and runs a check.

    If one of them raises, an interrupt included, undoes all changes and raises the exception again.
    """
    undo: list[Callable[[], None]] = []
    try:
        for change in changes:
            undo.append(change.undo)
            change.apply()
        check()
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise


def changes_of(
    model: nn.Module,
    replacements: Mapping[int, nn.Module],
    fused: Mapping[str, str],
    updates: Iterable[tuple[nn.Parameter, Tensor]],
    device: torch.device | None,
) -> list[Change]:
    """The assignments that put new modules and new values in a model.

    Tensors that move are copied here; the changes only set references.

    Args:
        model: stays as it is.
        replacements: new modules by the id of the module that each replaces, wherever that is registered.
        fused: activations that layers compute: function by the name of the activation's module.
        updates: parameters that stay, with their new values.
        device: new device of parameters and buffers that stay; None leaves them where they are.
    """
    kept = [module for module in model.modules() if id(module) not in replacements]
    if device is not None:
        new_values = {id(p): value for p, value in updates}
        parameters = {id(p): p for module in kept for p in module._parameters.values() if p is not None}
        updates = [(p, new_values.get(id(p), p.data).to(device)) for p in parameters.values()]
    buffers = {id(b): b for module in kept for b in module._buffers.values() if b is not None}
    moved = {key: b.to(device) for key, b in buffers.items()} if device is not None else buffers

    changes: list[Change] = []
    for module in kept:
        children = module._modules
        changes += [_item(children, key, replacements[id(c)]) for key, c in children.items() if id(c) in replacements]
        for key, buffer in module._buffers.items():
            if buffer is not None and moved[id(buffer)] is not buffer:
                changes.append(_item(module._buffers, key, moved[id(buffer)]))
    for name, activation in fused.items():
        path, _, key = name.rpartition(".")
        parent = model.get_submodule(path)
        layer = parent._modules.get(key_before(parent, key))
        changes.append(fuse(parent, key, replacements.get(id(layer)), activation))
    for parameter, value in updates:
        data = parameter.data
        changes.append(Change(partial(setattr, parameter, "data", value), partial(setattr, parameter, "data", data)))
    return changes


def _item(items: dict[str, Any], key: str, value: nn.Module | Tensor) -> Change:
    return Change(partial(items.__setitem__, key, value), partial(items.__setitem__, key, items[key]))
