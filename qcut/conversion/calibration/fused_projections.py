"""Layers that a module calls with one and the same tensor: the engine makes one product of them, if schemes agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.observers import input_hooks, run_observed
from qcut.models.modules import forward, weight_of


@torch.no_grad()
def fused_projections(
    model: nn.Module, batches: Iterable[Any], layers: Mapping[str, nn.Module]
) -> list[tuple[str, ...]]:
    """Sets of layers of one parent that are called one after the other with the same tensor: q, k, v, or gate, up.

    Only layers that `qcut.layers.stacking.Stacker` could stack under one scheme are in one set: those that all have a
    bias or all have none, and weights of one dtype and device. A layer that has other neighbours in another call is in
    no set.

    Args:
        model: in evaluation mode while it runs.
        batches: what the model is called on: each of them once, since data may decide which layers a call comes to.
        layers: the layers to look at, by name.

    Returns:
        Sets of two layers and more, in the order of their calls.
    """
    calls: list[list[str]] = []
    last: list[Tensor] = []

    def observe(name: str, x: Tensor) -> None:
        if last and last[0] is x and _alike(calls[-1][0], name, layers):
            calls[-1].append(name)
        else:
            calls.append([name])
        last[:] = [x]

    def run(batch: Any) -> None:
        forward(model, batch)
        last.clear()

    run_observed(model, batches, input_hooks(layers, observe), run, "fused projections", progress=False)
    sets = dict.fromkeys(tuple(names) for names in calls)
    often = [name for names in sets for name in names]
    return [names for names in sets if len(names) > 1 and all(often.count(name) == 1 for name in names)]


def _alike(first: str, name: str, layers: Mapping[str, nn.Module]) -> bool:
    """Whether two layers, called with one tensor, can be rows of one."""
    if first.rpartition(".")[0] != name.rpartition(".")[0]:
        return False
    a, b = layers[first], layers[name]
    weights = weight_of(a), weight_of(b)
    biases = [module._parameters.get("bias") is None for module in (a, b)]
    return biases[0] == biases[1] and weights[0].dtype == weights[1].dtype and weights[0].device == weights[1].device
