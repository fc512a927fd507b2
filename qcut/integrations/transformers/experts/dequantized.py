"""Gives transformers' own experts modules the weights that quantized experts compute with."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from qcut.errors import UnsupportedError
from qcut.layers.experts.experts import Experts, Projection, count_of, layer_of
from qcut.layers.experts.weights import open_experts
from qcut.layers.linear import Linear

_APART = (("gate_proj", "up_proj"), ("mlp.w1", "mlp.v1"))
"""Names of gate and up in classes that have a parameter of each."""


def fill_experts(module: nn.Module, experts: Experts, dtype: torch.dtype, name: str) -> None:
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
    plain = open_experts(module, name)  # in the memory of the module, if it can be
    if isinstance(plain, str):
        raise UnsupportedError(f"{name}: {plain}")
    held = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for target, source in ((plain.up, experts.up), (plain.down, experts.down)):
        if sizes := _different_sizes(target, source):
            raise UnsupportedError(f"{name}: the experts are {sizes[1]}; the model's class has {sizes[0]}")
        with torch.no_grad():
            for e in range(count_of(target)):
                _copy(cast(nn.Linear, layer_of(target, e)), layer_of(source, e))
        if count_of(target) and layer_of(target, 0).weight.untyped_storage().data_ptr() not in held:
            _put_back(module, cast(nn.ModuleList, target))
    if experts.post_expert_norm is not None:
        module.post_expert_norm = experts.post_expert_norm


def _different_sizes(one: Projection, other: Projection) -> tuple[str, str] | None:
    sizes = []
    for projection in (one, other):
        layer = layer_of(projection, 0) if count_of(projection) else None
        rows = [] if layer is None else [layer.out_features, layer.in_features]
        sizes.append(str([count_of(projection), *rows]))
    return None if sizes[0] == sizes[1] else (sizes[0], sizes[1])


def _copy(target: nn.Linear, source: nn.Linear | Linear) -> None:
    target.weight.copy_(source.dequantized_weight() if isinstance(source, Linear) else source.weight)
    if target.bias is not None and source.bias is not None:
        target.bias.copy_(source.bias)


@torch.no_grad()
def _put_back(module: Any, up: nn.ModuleList) -> None:
    """Write rows of gate and up, which are copies, to where the module has them: in turns, or in two parameters."""
    layers = [cast(nn.Linear, layer) for layer in up]
    names = dict(module.named_parameters())
    apart = next((pair for pair in _APART if names.keys() >= set(pair)), None)
    for e, layer in enumerate(layers):
        for key, values in {"gate_up_proj": layer.weight, "gate_up_proj_bias": layer._parameters["bias"]}.items():
            if values is None:
                continue
            for half, part in enumerate(values.chunk(2)):
                if apart is not None:
                    names[apart[half]].view(len(layers), *part.shape)[e].copy_(part)
                    continue
                rows: Tensor = names[key][e]
                rows = rows.t() if module.is_transposed and rows.ndim == 2 else rows
                rows[half::2].copy_(part)
