"""Values that a layer has read from its small tensors onto the host, for launches to take as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class Reading(Generic[V]):
    """A value read from tensors. It holds for these objects, until torch writes to one of them.

    Args:
        tensors: what was read.
        value: what was found.
    """

    __slots__ = ("_tensors", "_versions", "value")

    def __init__(self, tensors: Sequence[Tensor], value: V) -> None:
        self._tensors = tuple(tensors)
        self._versions = tuple(-1 if t.is_inference() else t._version for t in tensors)
        self.value = value

    def holds_for(self, *tensors: Tensor) -> bool:
        """Whether these are the tensors that were read, with what they held then."""
        for mine, version, tensor in zip(self._tensors, self._versions, tensors, strict=True):
            # Tensors of inference mode count no versions.
            if mine is not tensor or (version >= 0 and tensor._version != version):
                return False
        return True
