"""Gradients of quantized layers with respect to their inputs, to train what lies before them: adapters, mostly.

The forward pass is the layer's own, bit by bit. The backward pass multiplies by the dequantized weight, which is made
there and dropped: one layer's float weight is alive at a time, whatever the depth of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qcut.errors import QuantizationError, UnsupportedError, layer_prefix
from qcut.layers.quantized import QuantizedLayer, quantized_layers
from qcut.models.selection import check_model
from qcut.numerics.chunks import row_chunks
from qcut.schemes import Scheme, check_activation

_ATEN = torch.ops.aten


def enable_input_gradients(model: nn.Module) -> None:
    """Let backward passes go through a model's quantized layers, to train adapters, prompts, or float layers between.

    Sets `qcut.Linear.input_gradients` on every quantized layer. The quantized weights, scales and biases are buffers
    and stay frozen. A layer's result has the same bits as before, and nothing is computed or kept where no gradient is
    wanted. Its input gets ``dx = (dy * act'(z)) @ W``:

    * W is the dequantized weight, float32, rounded to dy's type; the products are torch's own in that type.
    * Where the layer computes an activation, ``z = x @ W.T + b`` is computed anew in float32; x is kept for that.
    * The quantization of x is passed straight through, as if it were the identity: its true derivative is 0 nearly
      everywhere. Inputs that a static range clips get their gradients, too.

    ``torch.compile``, gradient checkpointing and autocast work. A second derivative raises `UnsupportedError`.

    Args:
        model: any module that holds quantized layers, or is one. Layers that are quantized later need another call.

    Raises:
        DtypeError: the model is no ``nn.Module``.
        QuantizationError: it has no quantized layer.
    """
    for layer in _layers(model):
        layer.input_gradients = True


def disable_input_gradients(model: nn.Module) -> None:
    """Take `enable_input_gradients` back: a backward pass that reaches a quantized layer raises again; errors alike."""
    for layer in _layers(model):
        layer.input_gradients = False


def _layers(model: nn.Module) -> Iterator[QuantizedLayer]:
    check_model(model)
    found = quantized_layers(model)
    if not found:
        raise QuantizationError(f"{type(model).__name__}: no quantized layer; qcut.quantize makes them")
    return iter(found.values())


class _Layer(Protocol):
    """What `InputGradient` needs of a layer."""

    name: str | None
    scheme: Scheme
    activation: str
    in_features: int
    out_features: int
    bias: Tensor | None
    _buffers: dict[str, Tensor | None]

    def _product(self, x: Tensor) -> Tensor: ...

    def rows(self, index: Tensor) -> Tensor: ...


class InputGradient(torch.autograd.Function):
    """``y = layer(x)`` with the gradient that `enable_input_gradients` states."""

    @staticmethod
    def forward(x: Tensor, layer: _Layer) -> Tensor:
        """The layer's product; torch records nothing of it.

        Raises:
            UnsupportedError: a buffer of the layer wants a gradient.
        """
        for key, buffer in layer._buffers.items():
            if buffer is not None and buffer.requires_grad:
                raise UnsupportedError(
                    f"{layer_prefix(layer.name)}{key} requires a gradient; quantized layers are frozen"
                )
        return layer._product(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Layer], output: Tensor) -> None:
        """Keeps x if the derivative of an activation will need it."""
        x, layer = inputs
        ctx.layer = layer
        if layer.activation != "none":
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient of x, of its dtype.

        Raises:
            UnsupportedError: the graph of the backward pass is wanted.
        """
        layer: _Layer = ctx.layer
        # Compilers trace backward passes with gradients on, and refuse second ones themselves.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                f"{layer_prefix(layer.name)}{layer.scheme.name}: a second derivative is wanted (create_graph=True); "
                "quantized layers have only first derivatives"
            )
        # A backward pass inside autocast would compute in another type than outside.
        with torch.autocast(dy.device.type, enabled=False):
            if layer.activation == "none":
                return dy @ _weight(layer, dy), None
            weight = _weight(layer, dy, torch.float32)
            z = nn.functional.linear(ctx.saved_tensors[0].float(), weight, layer.bias)
            return _before_activation(dy, z, layer.activation) @ weight.to(dy.dtype), None


def _weight(layer: _Layer, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The dequantized weight ``[N, K]`` of a dtype, made in chunks of rows, without waiting for the device."""
    n, k = layer.out_features, layer.in_features
    weight = like.new_empty((n, k), dtype=dtype)
    for rows in row_chunks(n, k):
        weight[rows] = layer.rows(torch.arange(rows.start, rows.stop, device=like.device, dtype=torch.int64))
    return weight


def _before_activation(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """``dy * act'(z)``, computed in float32, of dy's dtype."""
    d = dy.float()
    match check_activation(activation):
        case "relu":
            d = _ATEN.threshold_backward(d, z, 0)
        case "gelu_erf":
            d = _ATEN.gelu_backward(d, z, approximate="none")
        case "gelu_tanh":
            d = _ATEN.gelu_backward(d, z, approximate="tanh")
        case "silu":
            d = _ATEN.silu_backward(d, z)
        case _:
            raise UnsupportedError(f"activation {activation!r} has no derivative")
    return d.to(dy.dtype)
