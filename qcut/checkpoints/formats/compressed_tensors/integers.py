"""Integers of compressed-tensors.

- ``int-quantized``: ``weight`` int8 ``[N, K]``, ``weight_scale`` ``[N, 1]``, or ``[1]`` for one scale of a layer.
- ``pack-quantized``: ``weight_packed`` int32 ``[N, K / 8]`` of 4 bits (``[N, K / 4]`` of 8), along K, low bits first,
  q + 8; ``weight_scale`` ``[N, G]``; ``weight_shape`` int64 ``[2]``; without symmetry ``weight_zero_point`` int32
  ``[ceil(N / 8), G]``, packed along N in the same way; of columns sorted by activation ``weight_g_idx`` int32 ``[K]``,
  the group of each column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import column_order, packed_layer, unpack_int32
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import FLOATS, Parts
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.schemes import W8A8, W8A16

_ORDERS = {"none": "none", "false": "none", "weight": "weight", "static": "weight"} | dict.fromkeys(
    ("group", "dynamic", "true"), "group"
)
"""By ``actorder``, whether groups are of columns that are sorted, or only weights were found in another order."""


class _Integers(ABC):
    """The arguments of a group of integers, checked."""

    name: ClassVar[str]
    bits_served: ClassVar[tuple[int, ...]]
    strategies: ClassVar[tuple[str, ...]]

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None:
        bits, kind, strategy = weights["num_bits"], weights["type"], weights["strategy"]
        size = weights["group_size"]
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if kind != "int" or bits not in self.bits_served:
            raise UnsupportedError(
                f"{where}: weights are {kind} of {bits} bits; {self.name} is served of int with "
                f"{' or '.join(map(str, self.bits_served))} bits"
            )
        order = _ORDERS.get(str(weights["actorder"]).lower())
        if order is None:
            raise UnsupportedError(f"{where}: actorder is {str(weights['actorder'])[:80]!r}; group and weight are read")
        if strategy not in self.strategies:
            raise UnsupportedError(
                f"{where}: weights have the strategy {strategy!r}; {', '.join(self.strategies)} are served"
            )
        if strategy == "group" and (size is None or size < 1):
            raise CheckpointError(f"{where}: weights have groups of {size}; allowed: 1 and more")
        if tokens is not None:
            found = {key: tokens[key] for key in ("num_bits", "type", "symmetric", "strategy", "dynamic")}
            wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
            if found != wanted or bits != 8 or strategy == "group" or not weights["symmetric"]:
                raise UnsupportedError(
                    f"{where}: input_activations are {found} with weights of {bits} bits; {wanted} with symmetric "
                    "weights of 8 bits and a scale for each row are served"
                )
        self.bits, self.symmetric, self.one_scale = bits, weights["symmetric"], strategy == "tensor"
        self.group_size = size if strategy == "group" else None
        self.rows: W8A8 | W8A16 = W8A16() if tokens is None else W8A8()
        self.ordered = order == strategy == "group"

    @abstractmethod
    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""

    @abstractmethod
    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, self.codes(parts), self.grid(parts))


class IntQuantized(_Integers):
    """int8 weights with a scale for each row, or for the layer; see `Layout`."""

    name, bits_served, strategies = "int-quantized", (8,), ("channel", "tensor")

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None:
        super().__init__(weights, tokens, where)
        if not self.symmetric:
            raise UnsupportedError(f"{where}: weights are not symmetric; symmetric ones are served of {self.name}")

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        parts.only(("weight", "weight_scale", "weight_zero_point", "bias"))
        parts.require("weight", ("I8",), [parts.n, parts.k])
        parts.require("weight_scale", FLOATS, *([[1], []] if self.one_scale else [[parts.n, 1], [parts.n]]))

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return parts.read("weight").view(torch.uint8) ^ 0x80

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        scales = parts.read_scales("weight_scale")
        if "weight_zero_point" in parts.tensors and bool(parts.read("weight_zero_point").any()):
            raise parts.error("weight_zero_point", "found values that are not 0; symmetric weights have none")
        return Grid(8, scales.reshape(-1, 1).expand(parts.n, 1), None, None, rows=self.rows)

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """See `Layout.row_scheme`."""
        if self.one_scale:
            raise UnsupportedError(f"{where} has one scale for the whole layer; {_ROWS}")
        return self.rows


class PackQuantized(_Integers):
    """Integers of 4 or 8 bits packed in int32, with scales of groups or rows; see `Layout`."""

    name, bits_served, strategies = "pack-quantized", (4, 8), ("group", "channel")

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k, per_int32 = parts.n, parts.k, 32 // self.bits
        own = ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx", "bias")
        parts.only(own if self.symmetric else (*own, "weight_zero_point"))
        if self.ordered or "weight_g_idx" in parts.tensors:
            parts.require("weight_g_idx", ("I32", "I64"), [k])
        groups = -(-k // (self.group_size or k))
        parts.require("weight_packed", ("I32",), [n, -(-k // per_int32)])
        parts.require("weight_scale", FLOATS, [n, groups])
        parts.require("weight_shape", ("I64", "I32"), [2])
        if not self.symmetric:
            parts.require("weight_zero_point", ("I32",), [-(-n // per_int32), groups])

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return unpack_int32(parts.read("weight_packed"), self.bits, 1)[:, : parts.k]

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        n, k = parts.n, parts.k
        scales = parts.read_scales("weight_scale")
        if (shape := parts.read("weight_shape").tolist()) != [n, k]:
            raise parts.error("weight_shape", f"found {shape}; the model needs {[n, k]}")
        zero_points: Tensor | None = None
        if not self.symmetric:
            zero_points = unpack_int32(parts.read("weight_zero_point"), self.bits, 0)[:n]
        g_idx = "weight_g_idx"
        unset = g_idx in parts.tensors and bool((parts.read(g_idx) == -1).all())
        if unset and self.ordered:
            raise parts.error(g_idx, "found -1 of all columns; needed: their groups, since actorder is 'group'")
        order = None if unset else column_order(parts, g_idx, self.group_size)
        return Grid(self.bits, scales, zero_points, self.group_size, order, self.rows)

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """See `Layout.row_scheme`."""
        raise UnsupportedError(f"{where} has packed integers of {self.bits} bits; {_ROWS}")


_ROWS = "allowed: int-quantized, with a scale for each row"
