"""Gives transformers' own experts modules the weights that quantized experts compute with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qcut.errors import UnsupportedError
from qcut.layers.experts.experts import Experts, Projection, count_of, layer_of
from qcut.layers.experts.weights import expert_weights
from qcut.layers.linear import Linear


def fill_experts(module: Any, experts: Experts, dtype: torch.dtype, name: str) -> None:
    """Fill a module of transformers' experts as its class lays the weights out: transposed or interleaved.

    Args:
        module: on the meta device; changed in place.
        experts: quantized, in whole or in part.
        dtype: of the new weights.
        name: of the module, for messages.

    Raises:
        UnsupportedError: the class is not one that qcut quantizes, or has other sizes.
    """
    device = next(tensor.device for tensor in (*experts.buffers(), *experts.parameters()))
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                zeros = torch.zeros(parameter.shape, dtype=dtype, device=device)
                part._parameters[key] = nn.Parameter(zeros, requires_grad=False)
    weights = expert_weights(module)
    if isinstance(weights, str):
        raise UnsupportedError(f"{name}: {weights}")
    held = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for projection, weight, bias, own in (
        (experts.up, weights.up, weights.up_bias, ("gate_up_proj", "gate_up_proj_bias")),
        (experts.down, weights.down, weights.down_bias, ("down_proj", "down_proj_bias")),
    ):
        one = layer_of(projection, 0)
        found, needed = (count_of(projection), one.out_features, one.in_features), tuple(weight.shape)
        if found != needed:
            raise UnsupportedError(f"{name}: the experts are {list(found)}; the model's class has {list(needed)}")
        _copy(projection, weight, bias)
        if weight.untyped_storage().data_ptr() not in held:  # a copy: its rows are interleaved in the module
            rows = getattr(module, own[0])
            _interleave(rows.transpose(1, 2) if module.is_transposed else rows, weight)
            if bias is not None:
                _interleave(getattr(module, own[1]), bias)
    if experts.post_expert_norm is not None:
        module.post_expert_norm = experts.post_expert_norm


def _copy(projection: Projection, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        for e in range(count_of(projection)):
            layer = layer_of(projection, e)
            weight[e].copy_(layer.dequantized_weight() if isinstance(layer, Linear) else layer.weight)
            if bias is not None and layer.bias is not None:
                bias[e].copy_(layer.bias)


def _interleave(rows: Tensor, halves: Tensor) -> None:
    """Write rows gate, up, gate, up … from all gates above all ups."""
    gate, up = halves.chunk(2, 1)
    with torch.no_grad():
        rows[:, 0::2], rows[:, 1::2] = gate, up
