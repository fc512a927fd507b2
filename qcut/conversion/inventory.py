"""Counts a model's parameters by what they are, so that a report can say what stays in float."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from qcut.layers.base import Linear
from qcut.models.modules import looks_linear, tensor_key

QUANTIZED, ALREADY = "quantized", "already quantized"

KINDS = (QUANTIZED, ALREADY, "embeddings", "experts", "convolutions", "linear layers", "norms", "other")
"""What a parameter can be. One that several modules share is of the first kind that any of them makes it.

Experts are matrices that lie in one parameter of three dimensions, nearly always those of a mixture of experts; linear
layers are those that stay in float; other is the rest: positions, gates, the packed projection of
``nn.MultiheadAttention``.
"""


def count_parameters(model: nn.Module, chosen: Container[int]) -> dict[str, int]:
    """Numbers of parameters by kind, in the order of `KINDS`, shared ones once, without kinds that the model lacks.

    Args:
        model: before it is changed.
        chosen: ids of the modules that will be quantized.

    Returns:
        The sum of the numbers is that of the model's parameters, and of the weights and biases that are quantized
        already.
    """
    kinds: dict[tuple[Any, ...], tuple[int, int]] = {}
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        if isinstance(module, Linear):
            first = next(module.buffers())
            bias = 0 if module.bias is None else module.out_features
            kinds[tensor_key(first)] = (KINDS.index(ALREADY), module.out_features * module.in_features + bias)
            continue
        kind = QUANTIZED if id(module) in chosen else _kind(module)
        # What a layer's weight is computed from, as in weight norm, is of the layer's kind.
        whole = kind in ("embeddings", "convolutions", "linear layers")
        if whole:
            inside |= {id(part) for part in module.modules()}
        for parameter in module.parameters(recurse=whole):
            key = tensor_key(parameter)
            kinds[key] = min(kinds.get(key, (len(KINDS), 0)), (KINDS.index(kind), parameter.numel()))
    counts = dict.fromkeys(KINDS, 0)
    for rank, count in kinds.values():
        counts[KINDS[rank]] += count
    return {kind: count for kind, count in counts.items() if count}


def _kind(module: nn.Module) -> str:
    own = [p for p in module._parameters.values() if p is not None]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embeddings"
    if isinstance(module, _ConvNd):
        return "convolutions"
    if looks_linear(module):
        return "linear layers"
    if any(p.ndim == 3 and min(p.shape) > 1 for p in own):
        return "experts"
    weight = module._parameters.get("weight")
    return "norms" if weight is not None and all(p.ndim == 1 for p in own) and not module._modules else "other"
