"""`QuantizedLayer`, the protocol of quantized layers for conversion, checkpoints and the engine, and `FrozenWeight`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qcut.models.modules import Quantized, tensor_key
from qcut.numerics.checks import out_of_range, same_values
from qcut.schemes import Scheme

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class StateEntry:
    """A tensor of a layer's state dict before it is made.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        identity: equal for tensors of two layers that are one and the same, tied.
        read: makes the tensor, or returns it if it exists.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: tuple[Any, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> StateEntry:
        """The entry of a tensor that exists."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor_key(tensor), lambda: tensor)


class QuantizedLayer(Quantized):
    """The protocol of quantized layers: `qcut.Linear` follows it, and so does a new kind of layer.

    Weights are buffers. A layer's parameters, if any, stand for its float weights; no checkpoint has them.

    Attributes:
        name: name of the layer, for error messages.
        scheme: how the weights are quantized.
        in_features: columns of the weight.
        out_features: its rows.
        float_count: elements of the float layer's weights and biases.
        input_gradients: whether its input has gradients; see `qcut.enable_input_gradients`.
        parts: processes that have a part each of a layer that is cut across them; 1 where the layer is whole. Nothing
            that one process has of such a model is a checkpoint.
    """

    name: str | None
    scheme: Scheme
    in_features: int
    out_features: int
    float_count: int
    input_gradients: bool = False
    parts: int = 1

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the float weight that the layer stands for; ``.half()`` and the like change it.

        Model code reads it as ``weight.dtype`` and casts inputs to it; the layer itself takes any.
        """
        held = self._parameters["weight"]
        assert held is not None
        return held.dtype

    @weight_dtype.setter
    def weight_dtype(self, dtype: torch.dtype) -> None:
        self._settle(dtype)

    @property
    def weight_rows(self) -> int:
        """Rows of all float weights that the layer stands for."""
        return self.out_features

    @property
    def weight_bytes(self) -> int:
        """Bytes of all buffers: what the layer keeps in memory."""
        return sum(b.nbytes for b in self.buffers())

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint says of the layer besides its tensors.

        Scheme, in_features, out_features, bias and activation are read without the layer; other keys are its kind's.
        """
        raise NotImplementedError

    @classmethod
    def from_json(cls, spec: Mapping[str, Any], name: str) -> Self:
        """The layer that `to_json` describes, on the meta device.

        Raises:
            ConfigError, QuantizationError, KeyError, TypeError, ValueError: the description is of no such layer.
        """
        raise NotImplementedError

    def stored(self) -> dict[str, StateEntry]:
        """The tensors of the state dict, by key, in the order they are written."""
        return {key: StateEntry.of(buffer) for key, buffer in self._buffers.items() if buffer is not None}

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """Looks for values that quantizing never gives, or that contradict one another.

        Args:
            state: the tensors of the state dict, by key, of the shapes and dtypes that `stored` states.

        Returns:
            The key of the first tensor that cannot be, and what was found and is allowed; None if all can be.
        """
        if "bias" in state and (found := out_of_range(state["bias"])):
            return "bias", f"found {found}; finite values are allowed"
        return None

    def tie_to(self, owner: Self) -> None:
        """Hold the owner's tensors wherever this layer's have the same values."""
        for name, buffer in owner._buffers.items():
            mine = self._buffers.get(name)
            if buffer is not None and mine is not None and same_values(buffer, mine):
                self._buffers[name] = buffer
        self._parameters["weight"] = owner._parameters["weight"]

    def _settle(self, dtype: torch.dtype) -> None:
        """Let the parameter be of a dtype, and where the buffers are."""
        device = next(self.buffers()).device
        held = self._parameters.get("weight")
        if held is not None and held.device.type == device.type:
            held.data = held.data.to(device, dtype)
        else:
            self._parameters["weight"] = FrozenWeight(
                (self.weight_rows, self.in_features), self._buffers, dtype, device
            )


class FrozenWeight(nn.Parameter):
    """A frozen parameter without elements, by which a model with quantized layers has a device, a dtype and a size.

    Tools ask ``next(model.parameters())`` for a model's device and dtype, and add up ``numel()`` for the number of its
    parameters. A layer's weight is in its buffers, so this tensor takes no bytes and is in no state dict.

    Args:
        shape: ``[N, K]`` of the weight.
        buffers: of the layer; a bias among them counts.
        dtype: of the float weight, ``Linear.weight_dtype``.
        device: of the buffers.
    """

    shape_nk: tuple[int, int]
    of: dict[str, Tensor | None]

    def __new__(
        cls,
        shape: tuple[int, int],
        buffers: dict[str, Tensor | None],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FrozenWeight:
        """An empty tensor."""
        empty = torch.empty((0, shape[1]), dtype=dtype, device=device)
        made: FrozenWeight = torch.Tensor._make_subclass(cls, empty, False)
        made.shape_nk, made.of = shape, buffers
        return made

    def numel(self) -> int:
        """Parameters of the float layer: ``N * K``, and N more with a bias."""
        n, k = self.shape_nk
        return n * k + (0 if self.of.get("bias") is None else n)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        made = memo[id(self)] = FrozenWeight(self.shape_nk, deepcopy(self.of, memo), self.dtype, self.device)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenWeight, (self.shape_nk, self.of, self.dtype, self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<frozen weight {list(self.shape_nk)} of a quantized layer>"


def float_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first floating parameter that is no quantized weight.

    Where the model has none, the dtype that its configuration states, or else float32.
    """
    floats = (p.dtype for p in model.parameters() if p.is_floating_point() and not isinstance(p, FrozenWeight))
    stated = getattr(getattr(model, "config", None), "dtype", None)
    return next(floats, stated if isinstance(stated, torch.dtype) else torch.float32)


def quantized_layers(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, QuantizedLayer]:
    """A model's quantized layers by name: each by its first name, or by every name."""
    modules = model.named_modules(remove_duplicate=remove_duplicate)
    return {name: module for name, module in modules if isinstance(module, QuantizedLayer)}


def set_weight_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Make this the `QuantizedLayer.weight_dtype` of all quantized layers of a model."""
    for layer in quantized_layers(model).values():
        layer.weight_dtype = dtype
