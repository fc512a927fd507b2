"""The operator through which vLLM's layers compute: opaque to ``torch.compile``, and captured by CUDA graphs.

A compiled model is one graph for all numbers of tokens, while qcut chooses kernels by that number: the choice is made
inside the operator. It finds its layer by the memory of the weight, an argument like any other, so that the graphs of a
model's layers are equal and are compiled once.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from qcut.models.modules import tensor_key
from qcut.ops.registry import operator

_layers: weakref.WeakValueDictionary[tuple[Any, ...], Linear] = weakref.WeakValueDictionary()


def attach(layer: nn.Module, computing: nn.Module) -> None:
    """Give a layer of vLLM the module that computes, as ``layer.qcut``.

    It is not one of the layer's modules: ``load_format="dummy"`` overwrites the floats of every module that it finds,
    codebooks and scales included, after layers have been quantized.
    """
    vars(layer)["qcut"] = computing


def serve(layer: Linear, weight: Tensor) -> None:
    """Let the operator find a layer by its weight; the weight's memory stays where it is."""
    _layers[tensor_key(weight)] = layer


@operator("served_linear", returns="Tensor", composed=True)
class ServedLinear(NamedTuple):
    """`Linear.forward` of x ``[..., K]`` by the layer of a weight, N ``out_features``.

    Raises:
        UnsupportedError: the weight has been moved since `serve` was given it.
    """

    x: Tensor
    weight: Tensor
    out_features: int

    def check(self) -> None:
        """Nothing that the layer does not check."""

    def fake(self) -> Tensor:
        """``[..., N]`` of x's dtype."""
        return self.x.new_empty((*self.x.shape[:-1], self.out_features))

    def cpu(self) -> Tensor:
        """The layer's result."""
        layer = _layers.get(tensor_key(self.weight))
        if layer is None:
            size = f"{self.out_features} x {self.x.shape[-1]}"
            raise UnsupportedError(f"a weight of {size} is no longer where it was loaded; offloading is not served")
        return cast(Tensor, layer(self.x))
