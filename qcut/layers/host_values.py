"""Values that a layer has read from its small tensors onto the host, for launches to take as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, cast

from torch import Tensor

V = TypeVar("V")
Buffers = Mapping[str, Tensor | None]


class Reading(Generic[V]):
    """A value read from tensors. It holds for these objects, until torch writes to one of them.

    Args:
        buffers: of the layer, by name.
        names: which of them were read.
        value: what was found.
    """

    __slots__ = ("_read", "value")

    def __init__(self, buffers: Buffers, names: Sequence[str], value: V) -> None:
        tensors = [(name, cast(Tensor, buffers[name])) for name in names]
        # Tensors of inference mode count no versions.
        self._read = [(name, tensor, None if tensor.is_inference() else tensor._version) for name, tensor in tensors]
        self.value = value

    def holds_for(self, buffers: Buffers) -> bool:
        """Whether the layer's buffers are those that were read, with what they held then."""
        for name, tensor, version in self._read:
            if buffers[name] is not tensor or (version is not None and tensor._version != version):
                return False
        return True
