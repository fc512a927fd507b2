"""Constants for looking up rows of a codebook weight, made once for each device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.codebooks import rotation
from qcut.codebooks.layout import Geometry
from qcut.process.locks import once


class Lookup(NamedTuple):
    """Constants of all weights with K columns in groups that are rotated alike.

    Attributes:
        places: int64 ``[K]``, the place in memory of each column.
        groups: int64 ``[K]``, the group of each column.
        rsqrt_sizes: float32 ``[G]``, ``1 / sqrt(columns)`` of each group; 1 without a rotation.
        turns: `qcut.codebooks.rotation.back_operands`.
    """

    places: Tensor
    groups: Tensor
    rsqrt_sizes: Tensor
    turns: tuple[Tensor, ...]


def lookup_for(kind: rotation.Kind, group_size: int, k: int, seed: int, device: torch.device) -> Lookup:
    """The constants of one pass on a device; a constant in compiled code.

    They are made at the first call, so that a later one can be captured into a graph.
    """
    compiling = torch.compiler.is_compiling()
    return (_traced if compiling else _cached)(kind, group_size, k, seed, device)


@once  # for good, and one for all threads: a CUDA graph may read them
def _cached(kind: rotation.Kind, group_size: int, k: int, seed: int, device: torch.device) -> Lookup:
    geometry = Geometry(k, group_size)
    parts = rotation.groups(k, geometry.full)
    places = geometry.columns(device)
    groups = rotation.per_column(torch.arange(len(parts), device=device), parts)
    turns = rotation.back_operands(k, kind, geometry.full, seed, device)
    # The copy to the device comes last and waits for the stream: from now on other streams may find all of them.
    sizes = torch.tensor([1.0 if kind == rotation.NO_ROTATION else d**-0.5 for _, d in parts], device=device)
    return Lookup(places, groups, sizes, turns)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced(kind: rotation.Kind, group_size: int, k: int, seed: int, device: torch.device) -> Lookup:
    return _cached(kind, group_size, k, seed, device)
