"""What packed integers stand for, and what a layer must hold to represent it exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.schemes import FP8, W8A8, W8A16

RowScheme = W8A8 | W8A16 | FP8
"""Schemes of weights of a byte with one scale for each row."""


class Needs(NamedTuple):
    """What a layer must hold. Layers of one stack hold what any of them needs.

    Attributes:
        wide: norms in float32.
        shifted: an offset for each norm; 8 bits take two passes then.
        ordered: an order of the columns.
    """

    wide: bool = False
    shifted: bool = False
    ordered: bool = False

    def union(self, other: Needs) -> Needs:
        """What both need."""
        return Needs(*(a or b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Grid:
    """The values of integers: ``w = scale * (q - zero_point)``, or ``scale * levels[q]``, of groups of columns.

    Attributes:
        bits: of an integer, 4 or 8.
        scales: floating ``[N, G]``, finite; e4m3 ones go with ``row_factor``.
        zero_points: integers ``[N, G]``; None: half of ``2**bits`` everywhere.
        group_size: columns of a group; None: whole rows.
        order: int32 ``[K]``: column j of a group's side by side multiplies column ``order[j]`` of x; None: column j.
        rows: the scheme of 8 bits with one scale for each row and no other zero points than 128. Of FP8 the "integers"
            are the bits of floats, and groups those of blocks.
        levels: what integers of 4 bits stand for, float32 ``[16]``, in any order; scales are then 0 or more, and there
            are no zero points. None: integers.
        row_factor: float64 ``[N]``, by which scales are multiplied; None: 1.
        input_scale: float32 ``[1]``, the scale of all tokens, of ``fp8_static``.
    """

    bits: int
    scales: Tensor
    zero_points: Tensor | None
    group_size: int | None
    order: Tensor | None = None
    rows: RowScheme = field(default_factory=W8A16)
    levels: Tensor | None = None
    row_factor: Tensor | None = None
    input_scale: Tensor | None = None

    def zeros(self) -> Tensor:
        """Zero points, int32 ``[N, G]``."""
        if self.zero_points is not None:
            return self.zero_points.to(torch.int32)
        return torch.full(self.scales.shape, 1 << self.bits - 1, dtype=torch.int32, device="cpu")

    def needs(self) -> Needs:
        """What a layer of these integers must hold."""
        if self.row_factor is not None:
            return Needs(ordered=self.order is not None)
        norms, zeros, ordered = stored_scales(self.scales), self.zeros(), self.order is not None
        wide = norms.dtype is torch.float32
        if self.levels is not None or isinstance(self.rows, FP8):
            return Needs(wide, False, ordered)
        if self.bits == 4:
            zeros = torch.where(self.scales < 0, 15 - zeros, zeros)
            return Needs(wide, bool(((zeros != 8) & (norms != 0)).any()), ordered)
        wide = wide or float(norms.abs().max()) * 16 > torch.finfo(torch.float16).max
        return Needs(wide, self.scales.shape[1] > 1 or bool((zeros != 128).any()), ordered)


def stored_scales(scales: Tensor) -> Tensor:
    """Scales as norms: in float16 where that holds them exactly, else in float32."""
    halves = scales.to(torch.float16)
    wide = scales.to(torch.float32)
    return halves if torch.equal(halves.float(), wide) else wide
