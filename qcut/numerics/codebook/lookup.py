"""Rows of a codebook weight by number, and their constants, made once for each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from qcut.common.locks import once
from qcut.numerics.codebook import float4, layout, pairs, rotation
from qcut.numerics.codebook.constants import outside_capture
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.plain_state import in_plain_state


class Lookup(NamedTuple):
    """Constants of all weights with K columns in groups that are rotated alike.

    Attributes:
        places: int64 ``[K]``, the place in memory of each column.
        groups: int64 ``[K]``, the group of each column.
        rsqrt_sizes: float32 ``[G]``, ``1 / sqrt(columns)`` of each group; 1 without a rotation.
        inverse_rotations: `qcut.numerics.codebook.rotation.back_operands`.
    """

    places: Tensor
    groups: Tensor
    rsqrt_sizes: Tensor
    inverse_rotations: tuple[Tensor, ...]


def lookup_for(kind: rotation.Kind, group_size: int, k: int, seed: int, device: torch.device) -> Lookup:
    """The constants of one pass on a device, made at the first call; a constant in compiled code."""
    compiling = torch.compiler.is_compiling()
    return (_traced if compiling else _cached)(kind, group_size, k, seed, device)


@once  # for good, and one for all threads: a CUDA graph may read them
@in_plain_state
def _cached(kind: rotation.Kind, group_size: int, k: int, seed: int, device: torch.device) -> Lookup:
    geometry = Geometry(k, group_size, kind)
    parts = rotation.groups(k, geometry.full)
    with outside_capture(device):
        places = geometry.columns(device)
        groups = rotation.per_column(torch.arange(len(parts), device=device, dtype=torch.int64), parts)
        inverse_rotations = rotation.back_operands(k, kind, geometry.full, seed, device)
        # The copy to the device comes last and waits for the stream: from now on other streams may find all of them.
        sizes = torch.tensor(
            [1.0 if kind == rotation.NO_ROTATION else d**-0.5 for _, d in parts], device=device, dtype=torch.float32
        )
    return Lookup(places, groups, sizes, inverse_rotations)


def _traced(kind: rotation.Kind, group_size: int, k: int, seed: int, device: torch.device) -> Lookup:
    return _cached(kind, group_size, k, seed, device)


# What torch.compiler.assume_constant_result sets. That decorator imports the compiler.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def look_up_rows(
    ids: Tensor,
    units: Sequence[Tensor],
    norms: Tensor,
    codebooks: Sequence[Tensor],
    bits: Sequence[int],
    kind: rotation.Kind,
    group_size: int,
    seeds: Sequence[int],
    k: int,
    norm_scale: Tensor | None = None,
) -> Tensor:
    """Rows of the weight that passes stand for, in plain torch on any device.

    Args:
        ids: int32 or int64 ``[R]``, each a row of ``norms``.
        units: for each set, uint8 units; a set holds all passes along K, or one pass.
        norms: float16 or float32 ``[N, passes * G]``, as stored; or float8_e4m3fn, with ``norm_scale``.
        codebooks: for each set, float32 ``[2**bits]``, or pairs, ``[256, 2]``.
        bits: for each set, the bits of an index.
        kind: kind of the rotation.
        group_size: columns of a group.
        seeds: a seed for each pass.
        k: columns.
        norm_scale: float64 ``[N]`` of e4m3 norms, else None.

    Returns:
        float32 ``[R, K]``.

    Exactness: bitwise the rows of `qcut.numerics.codebook.quantizer.dequantize`, zeros' signs aside, except for the
        rotation
    ``qr``: its float32 products depend on device and R.
    """
    geometry = Geometry(k, group_size, kind)
    # This look-up comes first, since it refuses ids out of range; packed weights have rows of padding.
    if norm_scale is None:
        own_norms = norms.index_select(0, ids).float()
    else:  # bytes: not every device of torch gathers 8-bit floats
        picked = norms.view(torch.uint8).index_select(0, ids).view(norms.dtype)
        own_norms = float4.float_norms(picked, norm_scale.index_select(0, ids))
    ids = ids.long()
    total: Tensor | None = None
    for p, seed in enumerate(seeds):
        of_set, first = (p, 0) if len(units) > 1 else (0, p * geometry.k_padded)
        lookup = lookup_for(kind, group_size, k, seed, ids.device)
        indices = layout.unpack_rows(units[of_set], bits[of_set], ids)[:, first : first + geometry.k_padded]
        # Groups that fill their slots need no reordering.
        in_order = geometry.padded_group == geometry.full
        indices = indices[:, :k] if in_order else indices.index_select(1, lookup.places)
        values = pairs.look_up(codebooks[of_set], indices)
        values = rotation.rotate_groups_back_by(values, kind, geometry.full, lookup.inverse_rotations)
        groups = slice(p * geometry.groups, (p + 1) * geometry.groups)
        row = values * (own_norms[:, groups] * lookup.rsqrt_sizes).index_select(1, lookup.groups)
        total = row if total is None else total + row
    return cast(Tensor, total)
