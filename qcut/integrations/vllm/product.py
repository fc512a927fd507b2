"""The operator through which vLLM's layers compute: opaque to ``torch.compile``, and captured by CUDA graphs.

A compiled model is one graph for all numbers of tokens, while qcut chooses kernels by that number: the choice is made
inside the operator. It finds its layer by the memory of the weight, an argument like any other, so that the graphs of a
model's layers are equal and are compiled once.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from qcut.errors import UnsupportedError
from qcut.layers.base import Linear

_layers: weakref.WeakValueDictionary[tuple[torch.device, int], Linear] = weakref.WeakValueDictionary()


def serve(layer: Linear, weight: Tensor) -> None:
    """Let `product` find a layer by the tensor of its weight that memory keeps where it is."""
    _layers[weight.device, weight.data_ptr()] = layer


@torch.library.custom_op("qcut_vllm::product", mutates_args=())
def product(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """`Linear.forward` of x ``[..., K]`` by the layer of a weight that `serve` was given.

    Raises:
        UnsupportedError: the weight has been moved since.
    """
    layer = _layers.get((weight.device, weight.data_ptr()))
    if layer is None:
        raise UnsupportedError(
            f"a weight of {out_features} output channels is no longer where it was loaded; vLLM's offloading of "
            "weights to the CPU is not served"
        )
    result: Tensor = layer(x)
    return result


@product.register_fake
def _(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
