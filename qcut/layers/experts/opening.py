"""Lays the experts of a model open as linear layers, one for each projection of each expert, for a while.

What works on linear layers (calibration, moments, plans, quantizing, verification) then works on experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qcut.models.modules import ExpertsModule, has_stacked_weights, replace_modules, tensor_key
from qcut.models.selection import held_elsewhere
from qcut.models.weight_sharing.readers import class_checked

if TYPE_CHECKING:
    from qcut.layers.experts.experts import Experts, Projection
    from qcut.layers.linear import Linear

PROJECTIONS = ("up", "down")


@dataclass
class Opened:
    """The experts of a model that are open.

    Attributes:
        experts: by name, what stands in the model for a while.
        original: by name, the module that stands there otherwise: transformers', or `Experts` with quantized stacks.
        left: by name, why a module with stacked weights is not open.
    """

    experts: dict[str, Experts] = field(default_factory=dict)
    original: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def stack_of(self, name: str) -> str | None:
        """The projection that a layer of an expert belongs to, such as ``mlp.experts.up`` of ``mlp.experts.up.3``."""
        stack, _, number = name.rpartition(".")
        experts, _, projection = stack.rpartition(".")
        return stack if experts in self.experts and projection in PROJECTIONS and number.isdigit() else None

    def members(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The layers of all experts, up before down, of the experts that some of the named layers belong to."""
        stacks = self.stacks()
        found = {stack.rpartition(".")[0] for name in names if (stack := self.stack_of(name)) is not None}
        return {
            experts: [one for key in PROJECTIONS for one in stacks.get(f"{experts}.{key}", ())]
            for experts in self.experts
            if experts in found
        }

    def stacks(self) -> dict[str, list[str]]:
        """The layers of every open projection, by its name."""
        return {
            f"{name}.{key}": [f"{name}.{key}.{e}" for e in range(experts.num_experts)]
            for name, experts in self.experts.items()
            for key in PROJECTIONS
            if isinstance(getattr(experts, key), nn.ModuleList) and len(getattr(experts, key))
        }


@contextmanager
def opened(model: nn.Module) -> Iterator[Opened]:
    """Let a model's experts be linear layers until the block ends: float ones, and those of quantized stacks."""
    found = Opened()
    every = {name: module for name, module in model.named_modules() if name and has_stacked_weights(module)}
    kept = _used_otherwise(model, every.values()) if every else {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, ExpertsModule) and name not in every:
            continue
        from qcut.layers.experts.weights import open_experts  # most models have none

        made = kept.get(id(module)) or open_experts(module, name)
        if isinstance(made, str):
            found.left[name] = made
        else:
            found.experts[name], found.original[name] = made, module
    replace_modules(model, {id(found.original[name]): made for name, made in found.experts.items()})
    try:
        yield found
    finally:
        replace_modules(model, {id(made): found.original[name] for name, made in found.experts.items()})


def _used_otherwise(model: nn.Module, experts: Collection[nn.Module]) -> dict[int, str]:
    """The modules of experts, by id, that other code does more with than call them, and what it does."""
    held = held_elsewhere(model, experts).items()
    found = {key: f"it is also held outside of the model's modules ({where})" for key, where in held}
    for key, user in class_checked(model, experts, ExpertsModule).items():
        found.setdefault(key, f"{user} checks its class, or uses what quantized experts have not")
    return found


def stacked(opened: Opened, layers: dict[str, Linear], device: torch.device | None = None) -> dict[str, Experts]:
    """Experts with quantized stacks, by name, for those with quantized layers.

    Args:
        opened: the float experts.
        layers: quantized layers by name, all experts of a projection or none; a projection without any stays in float.
            Those of experts are replaced by layers in the stacks' memory, so that no expert takes memory twice.
        device: of a projection that stays in float next to a quantized one; None leaves it where it is.
    """
    made: dict[str, Experts] = {}
    if not opened.experts:
        return made
    from qcut.layers.experts.linear_stack import LinearStack

    owners: dict[Any, LinearStack] = {}
    for name, experts in opened.experts.items():
        parts: dict[str, Projection] = {}
        for key in PROJECTIONS:
            names = [f"{name}.{key}.{e}" for e in range(experts.num_experts)]
            if all(one in layers for one in names):
                made_of = LinearStack.of([layers[one] for one in names], f"{name}.{key}")
                # Layers with one weight hold the same tensors: their stacks do, too.
                held = tuple(tensor_key(next(layers[one].buffers())) for one in names)
                owner = owners.setdefault(held, made_of)
                if owner is not made_of:
                    made_of.tie_to(owner)
                layers.update(zip(names, made_of.layers, strict=True))
                parts[key] = made_of
        if parts:
            for key in PROJECTIONS:
                if device is not None and key not in parts:
                    getattr(experts, key).to(device)
            made[name] = experts.with_projections(parts.get("up", experts.up), parts.get("down", experts.down))
    return made
