"""Tensors of a state dict as entries that are read when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcut.models.modules import tensor_key


@dataclass(frozen=True)
class StateEntry:
    """A tensor of a layer's state dict before it is made.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        identity: equal for tensors of two layers that are one and the same, tied.
        read: makes the tensor, or returns it where it exists.
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
