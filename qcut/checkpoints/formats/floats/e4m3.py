"""8-bit floats, e4m3, with scales of rows or blocks.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import FLOATS, Parts, Stored
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from qcut.schemes import FP8, FP8_BLOCK


class E4m3Layout:
    """``weight`` e4m3 ``[N, K]``, ``weight = scale * value``; see `IntegerFormat`.

    Tokens that the writer would quantize stay in 16 bits, and caches in their own type.

    Args:
        scales: key of the tensor of scales.
        rows: rows that share a scale; None: all.
        columns: columns that share a scale; None: all. Layers with more take a multiple of `FP8_BLOCK`.
        unused: keys of scales of tokens.
        cache_scales: see `CacheFormat`.
    """

    def __init__(
        self,
        scales: str,
        rows: int | None,
        columns: int | None = None,
        *,
        unused: tuple[str, ...] = (),
        cache_scales: tuple[str, ...] = (),
    ) -> None:
        self._scales, self._rows, self._columns, self._unused = scales, rows, columns, unused
        self.cache_scales = cache_scales

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return self._scales in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k = parts.n, parts.k
        each = self._columns or k
        columns = -(-k // each)
        if columns > 1 and each % FP8_BLOCK:
            raise UnsupportedError(
                f"{parts.where}: layer {parts.name!r} has {k} columns with a scale for each {each}; one for a "
                f"multiple of {FP8_BLOCK} columns, or for whole rows, is served of e4m3"
            )
        parts.only(("weight", self._scales, *self._unused, *self.cache_scales, "bias"))
        parts.require("weight", ("F8_E4M3",), [n, k])
        rows = 1 if self._rows is None else -(-n // self._rows)
        shapes = [[rows, columns], *([[rows]] if columns == 1 else []), *([[]] if rows == columns == 1 else [])]
        parts.require(self._scales, FLOATS, *shapes, [rows, 1, columns, 1])

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`: the bits."""
        return parts.read("weight").view(torch.uint8)

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        n, k = parts.n, parts.k
        columns = -(-k // (self._columns or k))
        scales, blocks = parts.read_scales(self._scales).reshape(-1, columns), columns > 1
        if blocks:
            scales = scales.repeat_interleave((self._columns or k) // FP8_BLOCK, 1)[:, : -(-k // FP8_BLOCK)]
        scales = scales.repeat_interleave(self._rows or n, 0)[:n]
        return Grid(8, scales, None, FP8_BLOCK if blocks else None, rows=FP8(blocks))

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, self.codes(parts), self.grid(parts))
