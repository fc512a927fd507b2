"""`LinearStack`: one projection of all experts, a quantized linear layer for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from qcut.errors import QuantizationError, ShapeError, layer_prefix
from qcut.layers.host_values import Reading
from qcut.layers.linear import Linear
from qcut.layers.quantized import FrozenWeight, QuantizedLayer, StateEntry
from qcut.models.guards import refuse_foreign_saving, refuse_stored
from qcut.models.modules import tensor_key

if TYPE_CHECKING:
    from typing_extensions import Self

    from qcut.layers.tokens import Prepared
    from qcut.numerics.routing import RouteTiles
    from qcut.schemes import Scheme

V = TypeVar("V")

MOST_EXPERTS = 1 << 16
MOST_ROWS = 1 << 31
"""Of all experts together: rows are counted in int32."""


class LinearStack(QuantizedLayer):
    """Linear layers of one scheme and one size, an expert's each, with their tensors stacked.

    Every tensor of the layers is here once, with the expert in front: ``qweight`` of W8A8 is ``[E, N, K_padded]``.
    What an expert's rows hold, and what it computes, is bitwise what a `qcut.Linear` of only its weight does.

    Args:
        experts: E.
        one: a layer as all of them are, on the meta device.
        device: where the buffers live. They are not initialized.

    Attributes:
        experts: E.
        in_features: K.
        out_features: N of one expert.
        scheme: of all layers.
        activation: of all layers.
        bias: float32 ``[E, N]`` or None.

    Raises:
        QuantizationError: no expert, or more than 65,536; or 2^31 rows and more.
    """

    bias: Tensor | None
    _one: Linear

    def __init__(self, experts: int, one: Linear, device: torch.device | str | None = None) -> None:
        super().__init__()
        if not 1 <= experts <= MOST_EXPERTS or experts * one.out_features >= MOST_ROWS:
            raise QuantizationError(
                f"{experts} experts of {one.out_features} rows; allowed: 1 to {MOST_EXPERTS} experts, and fewer than "
                f"{MOST_ROWS} rows in all",
                one.name,
            )
        self.experts, self.name, self.scheme = experts, one.name, one.scheme
        self.in_features, self.out_features, self.activation = one.in_features, one.out_features, one.activation
        self._readings: dict[Callable[..., Any], Reading[Any]] = {}
        self.__dict__["_one"] = one  # no child: its tensors are on the meta device, and in no state dict
        for key, buffer in one._buffers.items():
            shape = None if buffer is None else (experts, *buffer.shape)
            empty = None if buffer is None else torch.empty(shape or (), dtype=buffer.dtype, device=device)
            self.register_buffer(key, empty)
        self._settle(one.weight_dtype)

    @classmethod
    def of(cls, layers: Sequence[Linear], name: str | None = None) -> Self:
        """The stack of layers; their tensors are copied.

        Raises:
            QuantizationError: there is none, or they are not of one class, scheme, size, activation or device (named).
        """
        if not layers:
            raise QuantizationError("a stack of no layer; at least one is needed", name)
        first = layers[0]
        for layer in layers:
            if _signature(layer) != _signature(first):
                raise QuantizationError(f"{layer} is not as the first layer of the stack, {first}", layer.name or name)
        with torch.no_grad():
            made = cls(len(layers), _empty(first, name), "meta")
            made._buffers.update(
                {
                    key: None if buffer is None else torch.stack([_held(layer, key) for layer in layers])
                    for key, buffer in first._buffers.items()
                }
            )
        made._settle(first.weight_dtype)
        made.input_gradients = first.input_gradients
        return made.train(first.training)

    def expert(self, e: int) -> Linear:
        """The layer of one expert, in the memory of the stack.

        Raises:
            IndexError: there is no such expert.
        """
        if not 0 <= e < self.experts:
            raise IndexError(f"{layer_prefix(self.name)}expert {e}; allowed: 0 to {self.experts - 1}")
        refuse_stored(self.__dict__, layer_prefix(self.name))
        buffers = {key: None if buffer is None else buffer[e] for key, buffer in self._buffers.items()}
        held = next(buffer for buffer in buffers.values() if buffer is not None)
        size = self.out_features, self.in_features
        parameters = {"weight": FrozenWeight(size, buffers, self.weight_dtype, held.device)}
        one = object.__new__(type(self._one))
        # Hooks of a view are its own, and a cache of its weight.
        state = {key: OrderedDict() if isinstance(v, OrderedDict) else v for key, v in self._one.__dict__.items()}
        state |= {"_buffers": buffers, "_parameters": parameters, "_read": None, "training": self.training}
        state |= {"name": f"{self.name}.{e}" if self.name else None, "input_gradients": self.input_gradients}
        one.__dict__ = state
        return one

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The stacked tensors of the layers, by name."""
        return self._buffers

    @property
    def form(self) -> Linear:
        """A layer as all of them are, without tensors."""
        return self._one

    def read(self, keys: Sequence[str], make: Callable[..., V]) -> V:
        """What ``make`` finds in buffers, read on the host once, and again when they have changed."""
        read = self._readings.get(make)
        if read is None or not read.holds_for(self._buffers):
            read = self._readings[make] = Reading(self._buffers, keys, make(*(self._buffers[key] for key in keys)))
        return cast(V, read.value)

    def routed(self, x: Tensor | Prepared, tiles: RouteTiles, per_row: int, **options: Any) -> Tensor | None:
        """See `Linear.routed`."""
        return type(self._one).routed(self, x, tiles, per_row, **options)

    @property
    def layers(self) -> list[Linear]:
        """The layers of all experts; see `expert`."""
        return [self.expert(e) for e in range(self.experts)]

    def forward(self, input: Tensor) -> Tensor:
        """Refuses a call: which expert computes a token is decided by `qcut.layers.experts.experts.Experts`.

        Raises:
            ShapeError: always.
        """
        raise ShapeError(f"{layer_prefix(self.name)}a stack of {self.experts} experts is called by expert(e)")

    def dequantized_weight(self) -> Tensor:
        """float32 ``[E, N, K]``: the weights that the layers compute with."""
        return torch.stack([layer.dequantized_weight() for layer in self.layers])

    @property
    def float_count(self) -> int:  # type: ignore[override]
        """Elements of all weights and biases."""
        return self.experts * self._one.float_count

    @property
    def weight_rows(self) -> int:
        """See `QuantizedLayer.weight_rows`."""
        return self.experts * self.out_features

    def to_json(self) -> dict[str, Any]:
        """What `Linear.to_json` says of one layer, with the rows of all, and the number of experts."""
        return {**self._one.to_json(), "out_features": self.weight_rows, "experts": self.experts}

    @classmethod
    def from_json(cls, spec: Mapping[str, Any], name: str) -> Self:
        """See `QuantizedLayer.from_json`."""
        rows, experts = int(spec["out_features"]), int(spec["experts"])
        if rows % experts:
            raise QuantizationError(f"{rows} rows of {experts} experts; a multiple is allowed", name)
        return cls(experts, Linear.from_json({**spec, "out_features": rows // experts}, name), "meta")

    def stored(self) -> dict[str, StateEntry]:
        """The tensors of the layers' state dicts, with the expert in front."""
        return {key: self._stacked_entry(key, entry) for key, entry in self.expert(0).stored().items()}

    def _stacked_entry(self, key: str, one: StateEntry) -> StateEntry:
        first = next(buffer for buffer in self._buffers.values() if buffer is not None)

        def read() -> Tensor:
            held = self._buffers.get(key)
            if held is not None and held.shape == (self.experts, *one.shape) and held.dtype == one.dtype:
                return held
            return torch.stack([layer.stored()[key].read() for layer in self.layers])

        return StateEntry((self.experts, *one.shape), one.dtype, (*tensor_key(first), key), read)

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `QuantizedLayer.state_problem`; the expert is named."""
        for e in range(self.experts):
            if problem := self._one.state_problem({key: tensor[e] for key, tensor in state.items()}):
                return problem[0], f"expert {e}: {problem[1]}"
        return None

    def extra_repr(self) -> str:
        """Number of experts, sizes, bias, scheme and activation, for ``print(model)``."""
        return f"experts={self.experts}, {self._one.extra_repr()}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        refuse_foreign_saving(self.name)
        for key, entry in self.stored().items():
            tensor = entry.read()
            destination[prefix + key] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        *lists: list[str],
    ) -> None:
        missing_keys, unexpected_keys, error_msgs = lists
        own = {key: t for key, t in state_dict.items() if key.startswith(prefix)}
        stored = {prefix + key: entry for key, entry in self._one.stored().items()}
        missing_keys += [key for key in stored if key not in own]
        unexpected_keys += [key for key in own if key not in stored] if strict else []
        for key, entry in stored.items():
            if key in own and tuple(own[key].shape) != (self.experts, *entry.shape):
                error_msgs.append(f"{key}: found shape {list(own[key].shape)}; allowed: {[self.experts, *entry.shape]}")
        if error_msgs or any(key not in own for key in stored):
            return
        held = next(b for b in self._buffers.values() if b is not None)
        layers = []
        for e in range(self.experts):
            one = _empty(self._one, self.name)
            if not held.is_meta:
                one = one.to_empty(device=held.device)
            local = local_metadata | {"assign_to_params_buffers": True}
            mine = {key: own[key][e].to(None if held.is_meta else held.device) for key in stored}
            one._load_from_state_dict(mine, prefix, local, strict, *lists)
            layers.append(one)
        if not error_msgs:
            dtype = self.weight_dtype
            self._buffers.update(LinearStack.of(layers, self.name)._buffers)
            self._settle(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for key, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[key] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        self._settle(fn(torch.empty(0, dtype=self.weight_dtype, device="cpu")).dtype)
        return self


def _empty(layer: Linear, name: str | None) -> Linear:
    """A layer as this one, on the meta device."""
    scheme: Scheme = layer.scheme
    made = type(layer)(
        layer.in_features, layer.out_features, layer.bias is not None, scheme, layer.activation, "meta", name
    )
    made.weight_dtype = layer.weight_dtype
    return made.train(layer.training)


def _held(layer: Linear, key: str) -> Tensor:
    held = layer._buffers[key]
    assert held is not None
    return held


def _signature(layer: Linear) -> tuple[Any, ...]:
    tensors = {key: None if b is None else (b.shape, b.dtype, b.device) for key, b in layer._buffers.items()}
    return type(layer), layer.scheme, layer.in_features, layer.out_features, layer.activation, tensors
