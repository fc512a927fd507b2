"""8-bit floats, e4m3, with scales of rows or blocks.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import FLOATS, Parts, Stored
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from qcut.numerics.int16 import SMALLEST_SCALE
from qcut.schemes import FP8, FP8_BLOCK

INPUT_SCALE = "input_scale"
"""Key of the scale of all tokens, which are ``e4m3(x / input_scale)``."""


class E4m3Layout:
    """``weight`` e4m3 ``[N, K]``, ``weight = scale * value``; see `IntegerFormat`.

    Caches stay in their own type, and so do tokens of experts, for which no kernel takes e4m3: `grid` is that of
    ``fp8`` or ``fp8_blocks``.

    Args:
        scales: key of the tensor of scales.
        rows: rows that share a scale; None: all.
        columns: columns that share a scale; None: all. Layers with more take a multiple of `FP8_BLOCK`.
        tokens: what `layer` makes of tokens, see `FP8`; ``stored``: ``static`` where there is an ``input_scale``, else
            ``float``. Others than ``float`` go with ``columns`` None.
        unused: keys of scales of tokens.
        cache_scales: see `CacheFormat`.
    """

    def __init__(
        self,
        scales: str,
        rows: int | None,
        columns: int | None = None,
        *,
        tokens: Literal["float", "dynamic", "static", "stored"] = "float",
        unused: tuple[str, ...] = (),
        cache_scales: tuple[str, ...] = (),
    ) -> None:
        self._scales, self._rows, self._columns, self._tokens, self._unused = scales, rows, columns, tokens, unused
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
        own = ("weight", self._scales, *((INPUT_SCALE,) if self._tokens in ("static", "stored") else ()))
        parts.only((*own, *self._unused, *self.cache_scales, "bias"))
        parts.require("weight", ("F8_E4M3",), [n, k])
        rows = 1 if self._rows is None else -(-n // self._rows)
        shapes = [[rows, columns], *([[rows]] if columns == 1 else []), *([[]] if rows == columns == 1 else [])]
        parts.require(self._scales, FLOATS, *shapes, [rows, 1, columns, 1])
        if self._tokens_of(parts) == "static":
            parts.require(INPUT_SCALE, FLOATS, [1], [])

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
        tokens, input_scale = self._tokens_of(parts), None
        if tokens == "static":
            input_scale = parts.read_scales(INPUT_SCALE, SMALLEST_SCALE).reshape(1).to(torch.float32)
        grid = self.grid(parts)
        grid = grid if tokens == "float" else replace(grid, rows=FP8(tokens=tokens), input_scale=input_scale)
        return packed_layer(parts, self.codes(parts), grid)

    def _tokens_of(self, parts: Parts) -> Literal["float", "dynamic", "static"]:
        if self._tokens == "stored":
            return "static" if INPUT_SCALE in parts.tensors else "float"
        return self._tokens
