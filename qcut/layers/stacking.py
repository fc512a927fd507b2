"""Stacks modules that read the same rows (q, k and v, or gate and up) into one module, one product.

Weights of the modules are concatenated along N in a stack, and the modules' own tensors become views of the stack: no
weight is in memory twice, and the modules go on working. Writing into a module's tensor writes into the stack.
Replacing the tensor, by moving the model or loading codebooks, parts it from the stack, which keeps the old values. The
storage of a stack lives as long as one of its views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from qcut.layers.linear import Linear
from qcut.models.modules import tensor_key

_ALIGNMENT_BYTES = 16  # alignment of vector loads: kernels copy tensors that start elsewhere


class Stacker:
    """Stacks modules of a model.

    Args:
        model: the model as it is now, which shows the other users of modules and weights.

    Attributes:
        moved_bytes: bytes of the weights that were moved into a stack.
    """

    def __init__(self, model: nn.Module) -> None:
        self.moved_bytes = 0
        self._uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self._holders: dict[tuple[Any, ...], set[int]] = {}
        for module in model.modules():
            for tensor in _tensors(module).values():
                if _is_plain(tensor):
                    self._holders.setdefault(_storage(tensor), set()).add(id(module))

    def joined(self, projections: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
        """The `stack` of the projections, or the projections if they cannot be stacked."""
        one = self.stack(projections)
        return projections if one is None else (one,)

    def stack(self, projections: Sequence[nn.Module]) -> nn.Module | None:
        """A module that returns the results of all projections, side by side.

        The projections' tensors become views of the module's own. Projections that are views of one stack already are
        not copied.

        Args:
            projections: modules that are called with the same rows.

        Returns:
            ``nn.Linear`` or a layer of the projections' scheme, as the projections are. None if they cannot be stacked:
            different schemes, activations, dtypes or devices, or only some with a bias; W8A8 with static ranges;
            codebooks that differ, or rows that do not fill whole blocks of 64; rows that would start at no multiple of
            16 bytes; a module with hooks, a forward of its own or another class; a module that the model uses twice, or
            a weight that another module holds too.

        Raises:
            RuntimeError: torch's, if memory for these projections is short. They are not changed then.

        Exactness: rows of a weight do not know each other. Integer products, and thus W8A8 and codebooks with int8
        products, are bitwise the projections'. Sums of floats may have another order, for a kernel, its tile, or a
        library's algorithm is chosen by N.
        """
        parts = self._parts(projections)
        if parts is None:
            return None
        new: list[tuple[list[Tensor], Tensor]] = []
        # The model's weights must not become tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            whole: dict[str, Tensor] = {}
            for key, tensors in parts.items():
                adjoining = _adjoining(tensors)
                whole[key] = torch.cat([t.detach() for t in tensors]) if adjoining is None else adjoining
                if adjoining is None:
                    new.append((tensors, whole[key]))
            made = _module(projections, whole)
            for tensors, stacked in new:
                for tensor, rows in zip(tensors, stacked.split([len(t) for t in tensors]), strict=True):
                    tensor.data = rows  # the object stays: others may hold it
                self.moved_bytes += stacked.nbytes
        return made

    def _parts(self, projections: Sequence[nn.Module]) -> dict[str, list[Tensor]] | None:
        """The projections' tensors that have rows, by key; None if these cannot be stacked."""
        signatures = [_signature(module) for module in projections]
        if len(projections) < 2 or signatures[0] is None or any(s != signatures[0] for s in signatures):
            return None
        if any(self._uses[id(module)] != 1 for module in projections) or not _fit(projections):
            return None
        rows = [_rows(module) for module in projections]
        parts = {key: [one[key] for one in rows] for key in rows[0]}
        own = {id(module) for module in projections}
        for tensors in parts.values():
            starts = accumulate(t.nbytes for t in tensors[:-1])
            if any(start % _ALIGNMENT_BYTES for start in starts):
                return None
            tied = len({tensor_key(t) for t in tensors}) < len(tensors)
            if tied or any(not self._holders[_storage(t)] <= own for t in tensors):
                return None
        return parts


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = {} if isinstance(module, Linear) else module._parameters
    return {key: t for key, t in (*parameters.items(), *module._buffers.items()) if t is not None}


def _rows(module: nn.Module) -> dict[str, Tensor]:
    """Tensors with N, or tiles of it, as first dimension."""
    return module.row_buffers() if isinstance(module, Linear) else _tensors(module)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _storage(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _signature(module: nn.Module) -> tuple[Any, ...] | None:
    """What projections must have in common; None for a module that is never stacked."""
    cls: type[nn.Module] = type(module)
    own: tuple[Any, ...] = ()
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    if isinstance(module, Linear) and cls is Linear.subclass_for(module.scheme) and not module.scheme.needs_range:
        own = (module.in_features, module.scheme, module.activation)
    elif cls is not nn.Linear or not _tensors(module).keys() <= {"weight", "bias"}:
        return None
    tensors = _rows(module)
    if not all(_is_plain(t) and t.is_contiguous() and not t.is_inference() for t in tensors.values()):
        return None
    return cls, own, {key: (t.dtype, t.device, t.shape[1:]) for key, t in tensors.items()}


def _fit(projections: Sequence[nn.Module]) -> bool:
    """Whether concatenated packed rows equal rows packed together, and buffers shared by all rows are equal."""
    first = projections[0]
    if not isinstance(first, Linear):
        return True
    if any(cast(Linear, module).out_features % first.block_rows for module in projections[:-1]):
        return False
    shared = {key: t for key, t in _tensors(first).items() if key not in _rows(first)}
    return all(torch.equal(t, cast(Tensor, m._buffers[key])) for m in projections[1:] for key, t in shared.items())


def _adjoining(tensors: list[Tensor]) -> Tensor | None:
    """All tensors as one view, if each begins in memory where the one before ends; else None."""
    first, end = tensors[0], tensors[0].storage_offset()
    for t in tensors:
        if _storage(t) != _storage(first) or t.storage_offset() != end:
            return None
        end += t.numel()
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _module(projections: Sequence[nn.Module], tensors: dict[str, Tensor]) -> nn.Module:
    """A module of the projections' class around these tensors, in evaluation mode."""
    first: Any = projections[0]
    k, n = first.in_features, sum(cast(Any, module).out_features for module in projections)
    made: nn.Module
    if isinstance(first, Linear):
        name = " + ".join(str(cast(Linear, module).name) for module in projections) if first.name else None
        made = type(first)(k, n, first.bias is not None, first.scheme, first.activation, "meta", name)
        made._buffers.update({**first._buffers, **tensors})
        made.weight_dtype = first.weight_dtype
        made.input_gradients = all(cast(Linear, module).input_gradients for module in projections)
    else:
        made = nn.Linear(k, n, "bias" in tensors, device="meta")
        made._parameters.update({key: nn.Parameter(t, requires_grad=False) for key, t in tensors.items()})
    return made.eval()
