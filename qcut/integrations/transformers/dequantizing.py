"""Puts float modules back in place of quantized ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from qcut.errors import UnsupportedError
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.layers.parallel import refuse_parts
from qcut.models.fusion import FusedActivation, unfuse
from qcut.models.modules import ExpertsModule, is_conv1d, replace_modules

if TYPE_CHECKING:
    from qcut.layers.experts.experts import Experts


def dequantize(model: Any, dtype: torch.dtype | None) -> Any:
    """Give a model the modules of its class back, with the weights that the quantized layers compute with.

    Args:
        model: changed in place.
        dtype: of the new weights; None takes that of the model's other parameters.

    Raises:
        UnsupportedError: the class cannot be built from its configuration, or has other modules there; or a layer is a
            part of one that is cut across processes.
    """
    refuse_parts(model, "dequantize")
    dtype = dtype or model.dtype
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            plain: Any = type(model)(config)
    except Exception as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be built from its configuration: {error}") from error
    weights: dict[int, nn.Parameter] = {}
    new: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (Linear, Embedding, FusedActivation, ExpertsModule)) and not _inside(name, new):
            try:
                new[name] = plain.get_submodule(name)
            except AttributeError as error:
                raise UnsupportedError(f"{name}: {type(model).__name__} has no such module of its own") from error
            if isinstance(module, ExpertsModule):
                from qcut.integrations.transformers.experts.dequantized import fill_experts  # most models have none

                fill_experts(new[name], cast("Experts", module), dtype, name)
            else:
                _fill(new[name], module, dtype, weights)
    replace_modules(model, {id(model.get_submodule(name)): m.train(model.training) for name, m in new.items()})
    unfuse(model)
    return model


def _inside(name: str, others: dict[str, nn.Module]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _fill(module: nn.Module, quantized: nn.Module, dtype: torch.dtype, weights: dict[int, nn.Parameter]) -> None:
    if isinstance(quantized, FusedActivation):
        return
    layer: Any = quantized.linear if isinstance(quantized, Embedding) else quantized
    key = layer.norms if hasattr(layer, "norms") else layer.qweight
    weight = weights.get(id(key))
    if weight is None:
        value = layer.dequantized_weight().to(dtype)
        value = value.t().contiguous() if is_conv1d(module) else value
        weight = weights[id(key)] = nn.Parameter(value, requires_grad=False)
    module._parameters["weight"] = weight
    if isinstance(quantized, Linear) and module._parameters.get("bias") is not None:
        bias = layer.bias.to(dtype)
        module._parameters["bias"] = nn.Parameter(bias.clone(), requires_grad=False)
