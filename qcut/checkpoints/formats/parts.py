"""What a reader of another library's format is made of: `Format`, the tensors of a layer, and checks of both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qcut.common.safetensors import TensorFile, dtype_code
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.numerics.checks import out_of_range

FLOATS = ("F16", "BF16", "F32")
"""Codes of the dtypes that scales and biases may have."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.

    Attributes:
        code: of its dtype, as safetensors names it.
        shape: its shape.
        read: reads it into new memory on the CPU.
        name: in its safetensors file; empty if it is in none.
    """

    code: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    name: str = ""

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        """A tensor that exists."""
        return cls(dtype_code(tensor.dtype) or str(tensor.dtype), tuple(tensor.shape), lambda: tensor)

    @classmethod
    def in_file(cls, file: TensorFile, name: str, verify: bool = True) -> Stored:
        """A tensor of an open file."""
        header = file.headers[name]
        return cls(header.code, tuple(header.shape), lambda: file.read(name, verify=verify), name)


def names_in_files(tensors: Mapping[str, Stored]) -> tuple[str, ...]:
    """The names of a layer in the files that have its tensors, given by the ends of their names."""
    names = (stored.name.removesuffix(f".{key}") for key, stored in tensors.items())
    return tuple(dict.fromkeys(filter(None, names)))


@dataclass(frozen=True)
class Parts:
    """What a checkpoint holds of one linear layer.

    Attributes:
        name: of the layer.
        where: the file or folder, for messages.
        n: output channels of the model's layer.
        k: input channels of the model's layer.
        tensors: by the end of their names, behind that of the layer, such as ``weight_scale``.
        joint: what is between both parts of a tensor's name.
        other_names: of the layer, in the model and in the files, as far as they differ from ``name``. A configuration
            may mean the layer by any of them.
    """

    name: str
    where: object
    n: int
    k: int
    tensors: Mapping[str, Stored]
    joint: str = "."
    other_names: tuple[str, ...] = ()

    def full(self, key: str) -> str:
        """The name of a tensor."""
        return f"{self.name}{self.joint}{key}".removeprefix(".")

    def error(self, key: str, what: str) -> CheckpointError:
        """The error that one of the tensors is not as it must be."""
        return CheckpointError(f"{self.where}: tensor {self.full(key)!r}: {what}")

    def only(self, keys: Collection[str]) -> None:
        """Check that no other tensors are there.

        Raises:
            CheckpointError: one is.
        """
        for key in self.tensors:
            if key not in keys:
                raise self.error(key, f"the format has none of that name; allowed: {', '.join(sorted(keys))}")

    def require(self, key: str, codes: Sequence[str], *shapes: Sequence[int]) -> None:
        """Check a tensor's header.

        Raises:
            CheckpointError: it is missing, or of another dtype or shape.
        """
        stored = self.tensors.get(key)
        wanted = f"{' or '.join(codes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        if stored is None:
            raise self.error(key, f"is missing; needed: {wanted}")
        if stored.code not in codes or list(stored.shape) not in [list(shape) for shape in shapes]:
            raise self.error(key, f"found {stored.code} {list(stored.shape)}; needed: {wanted}")

    def require_bias(self) -> None:
        """Check the bias, if there is one."""
        if "bias" in self.tensors:
            self.require("bias", FLOATS, [self.n])

    def read(self, key: str) -> Tensor:
        """Read a tensor."""
        return self.tensors[key].read()

    def read_scales(self, key: str, least: float | None = None) -> Tensor:
        """Read a tensor of scales.

        Raises:
            CheckpointError: one is NaN or Inf, or below the least.
        """
        scales = self.read(key)
        if found := out_of_range(scales) if least is None else out_of_range(scales, least):
            above = "" if least is None else f" from {least:g}"
            raise self.error(key, f"found {found}; finite values{above} are needed")
        return scales

    def read_bias(self) -> Tensor | None:
        """The bias, float32 ``[N]``, or None.

        Raises:
            CheckpointError: a value is NaN or Inf.
        """
        return self.read_scales("bias").to(torch.float32) if "bias" in self.tensors else None


class Format(Protocol):
    """How a library stores quantized layers: made of the checkpoint's configuration, called for each layer.

    Formats with a ``quantization_config`` are made of it, as JSON holds it, and of the name of its file, for messages.
    They raise `CheckpointError` where a field is missing or holds what it cannot, and `UnsupportedError` where types,
    bits, strategies or a version are not served (named).
    """

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """Whether the tensors of a module, by the ends of their names, are those of a quantized layer."""

    def check(self, parts: Parts) -> None:
        """Check a layer's headers.

        Raises:
            CheckpointError: a tensor is missing, superfluous, or of another dtype or shape (named).
            UnsupportedError: the layer cannot be served exactly.
        """

    def layer(self, parts: Parts) -> Linear:
        """Read a layer with checked headers, on the CPU.

        Raises:
            CheckpointError: values that cannot be (named).
            UnsupportedError: the layer cannot be served exactly.
        """


@runtime_checkable
class CacheFormat(Format, Protocol):
    """A format that has scales of KV caches next to the weights of keys and values.

    Attributes:
        cache_scales: their keys. Layers that are left in float may have such scales, too; they are not read.
    """

    cache_scales: tuple[str, ...]


def refuse_others(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse unknown fields of a ``quantization_config`` that hold something: they may change what is computed.

    Args:
        data: the configuration.
        known: fields that are read, or that describe how the checkpoint was made.
        where: for messages.

    Raises:
        UnsupportedError: there is such a field; named, with its value.
    """
    for key, value in data.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise UnsupportedError(
                f"{where}: found the field {key[:80]!r} with {str(value)[:80]!r}, which qcut does not know and which "
                f"may change the weights; allowed: {', '.join(sorted(known))}"
            )
