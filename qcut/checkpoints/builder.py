"""Fills a model that was made without memory with the tensors of a checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from qcut.errors import CheckpointError
from qcut.layers.linear import Linear
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import in_plain_state


class Builder:
    """Puts tensors into a model one at a time, so that no second copy of the model exists.

    Args:
        model: with the modules that the tensors are for; tensors may be on the meta device.
        device: where the tensors shall be.
        dtype: what floating parameters are cast to; None keeps theirs.

    Attributes:
        modules: of the model, by every name.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.device, self.dtype = device, dtype

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a tensor, and the tensor's own name in it."""
        parent, _, key = name.rpartition(".")
        return self.modules[parent], key

    def put(self, names: Sequence[str], tensor: Tensor, where: object, *, buffers: bool = False) -> None:
        """Put one tensor under all its names, tied ones together.

        Args:
            names: in the model; the first one's parameter or buffer says what the tensor becomes.
            tensor: as it was read.
            where: its file, for messages.
            buffers: check the values of floating buffers too.

        Raises:
            CheckpointError: a value is NaN or Inf.
        """
        module, key = self.place(names[0])
        held = module._parameters.get(key)
        like: Tensor | None = module._buffers[key] if held is None else held
        assert like is not None
        new = as_like(tensor, like, self.device, self.dtype)
        checked = isinstance(new, nn.Parameter) or (buffers and new.is_floating_point())
        if checked and (found := out_of_range(new.detach())):
            raise CheckpointError(f"{where}: tensor {names[0]!r}: found {found}; finite values are needed")
        for name in names:
            module, key = self.place(name)
            (module._parameters if isinstance(new, nn.Parameter) else module._buffers)[key] = new  # type: ignore[assignment]


def as_like(
    tensor: Tensor, like: Tensor, device: torch.device | str, dtype: torch.dtype | None
) -> Tensor | nn.Parameter:
    """A tensor that was read, as the tensor that it takes the place of: a parameter, cast to the dtype, or a buffer."""
    is_parameter = isinstance(like, nn.Parameter)
    tensor = tensor.to(device, dtype if is_parameter and tensor.is_floating_point() else None)
    return nn.Parameter(tensor, like.requires_grad) if is_parameter else tensor


@in_plain_state
def fill_layer(
    layer: Linear, state: Mapping[str, Tensor], name: str, where: object, files: Mapping[str, object] | None = None
) -> None:
    """Give a layer the tensors of its state dict; the layer may lay them out anew.

    Args:
        layer: a quantized layer.
        state: every tensor that the layer stores.
        name: of the layer.
        where: the checkpoint, for messages.
        files: the file of each tensor, for messages, where they differ from the checkpoint.

    Raises:
        CheckpointError: a value that quantizing never gives (file and tensor are named), or what the layer refuses.
    """
    if not any(t.is_meta for t in state.values()) and (problem := layer.state_problem(state)):
        key, what = problem
        tensor = f"{name}.{key}" if name else key
        raise CheckpointError(f"{(files or {}).get(key, where)}: tensor {tensor!r}: {what}")
    try:
        layer.load_state_dict(state, assign=True)
    except RuntimeError as exc:
        raise CheckpointError(f"{where}: layer {name!r}: {exc}") from exc


def tie_layers(modules: Mapping[str, nn.Module], tied: Mapping[str, str]) -> None:
    """Let quantized layers whose tensors were stored under another's name hold that layer's tensors."""
    pairs = {}
    for name, owner in tied.items():
        layer, other = (modules.get(full.rpartition(".")[0]) for full in (name, owner))
        if layer is not other and isinstance(layer, Linear) and isinstance(other, Linear):
            pairs[id(layer)] = layer, other
    for layer, other in pairs.values():
        layer.tie_to(other)


def check_no_meta(modules: Mapping[str, nn.Module], path: Path) -> None:
    """Check that no module holds a tensor on the meta device outside its parameters and buffers.

    Raises:
        CheckpointError: one does.
    """
    for name, module in modules.items():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise CheckpointError(
                    f"{path}: {name}.{key} is a tensor that is no parameter or buffer, so no checkpoint holds it; "
                    "pass model=, built with its values"
                )
