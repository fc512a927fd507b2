"""The tensors of a codebook layer: buffers that its kernels read, made from passes, and those of its state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.layers.quantized import StateEntry
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import packing, pairs
from qcut.numerics.codebook.layout import UNIT_COLUMNS, Geometry
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.numerics.codebook.rotation import NO_ROTATION
from qcut.schemes import Codebook

NORM_SCALE = "norm_scale"
"""Key of the buffer and of the state dict: the factor of each row of e4m3 norms."""
PASS_KEYS = (("indices", "norms", "codebook"), ("residual_indices", "residual_norms", "residual_codebook"))
"""Keys of the state dict, of the first pass and of the second."""


class CodebookSet(NamedTuple):
    """What one product reads: all passes of one width, behind one another along K.

    Attributes:
        units: uint8 ``[T, U, bytes]``: T tiles of 16 rows, U units of 128 columns; see `qcut.numerics.codebook.layout`.
        packed_norms: float16 ``[T, U, slots, 8, 2]``, relative to the row's power of two.
        fold: float32 ``[16 T]``, which makes int8 of a row's weights; None except with int8 products.
        col_scale: float32 ``[N]``, the factor of each output channel.
        codebook: float32 ``[2**bits]``, or pairs, ``[256, 2]``.
    """

    units: Tensor
    packed_norms: Tensor
    fold: Tensor | None
    col_scale: Tensor
    codebook: Tensor


SET_KEYS = tuple(tuple(prefix + field for field in CodebookSet._fields) for prefix in ("", "residual_"))
"""Names of the buffers of a layer's first set and of its second."""


def codebook_shape(bits: int, in_pairs: bool) -> tuple[int, ...]:
    """The shape of a codebook."""
    return (pairs.COUNT, 2) if in_pairs else (1 << bits,)


def empty_set(
    n: int, units: int, bits: int, geometry: Geometry, int8: bool, in_pairs: bool, device: torch.device | str | None
) -> CodebookSet:
    """A set of uninitialized tensors.

    Args:
        n: rows of the weight.
        units: of 128 columns along K, those of all its passes.
        bits: of an index.
        geometry: of a pass.
        int8: products are of int8.
        in_pairs: the codebook is of pairs.
        device: of the tensors.
    """
    tiles = codebook_layout.row_tiles(n)
    norms_shape = tiles, units, UNIT_COLUMNS // geometry.slot, 8, 2
    fold_shape = tiles * codebook_layout.UNIT_ROWS
    return CodebookSet(
        torch.empty((tiles, units, codebook_layout.unit_bytes(bits)), dtype=torch.uint8, device=device),
        torch.empty(norms_shape, dtype=torch.float16, device=device),
        torch.empty(fold_shape, dtype=torch.float32, device=device) if int8 else None,
        torch.empty(n, dtype=torch.float32, device=device),
        torch.empty(codebook_shape(bits, in_pairs), dtype=torch.float32, device=device),
    )


def packed_set(
    passes: Sequence[RotatedCodebook],
    norms: Tensor,
    norm_scale: Tensor | None,
    bits: int,
    geometry: Geometry,
    int8: bool,
) -> CodebookSet:
    """The set of some passes, as new tensors on the norms' device.

    Args:
        passes: of one width, and with one codebook; their own norms are not looked at.
        norms: float16, float32 or float8_e4m3fn ``[N, passes * G]``, finite and not negative.
        norm_scale: float64 ``[N]`` of e4m3 norms, on their device, else None. ``col_scale`` has the product of it and
            the row's power of two, rounded to float32.
        bits: of an index.
        geometry: of a pass.
        int8: products are of int8.
    """
    device, first = norms.device, passes[0]
    exponents = codebook_layout.row_exponents(norms)
    parts = norms.split(geometry.groups, 1)
    units = torch.cat([codebook_layout.pack_units(q.indices.to(device), bits, geometry) for q in passes], 1)
    packed_norms = torch.cat([codebook_layout.pack_norms(part, exponents, geometry) for part in parts], 1)
    values = first.values.to(device, torch.float32, copy=True)
    col_scale = exponents if first.rotation == NO_ROTATION else exponents * geometry.full**-0.5
    if norm_scale is not None:
        col_scale = (exponents.double() * norm_scale).float()
    if not int8:
        return CodebookSet(units, packed_norms, None, col_scale, values)
    fold = codebook_layout.fold_scales(packed_norms, values.half())
    rows = fold[: len(norms)]
    return CodebookSet(units, packed_norms, fold, torch.where(rows > 0, col_scale / rows, 0.0), values)


def matching_state(
    state: Mapping[str, Any], prefix: str, wanted: Mapping[str, StateEntry], missing: list[str], errors: list[str]
) -> dict[str, Tensor]:
    """The tensors of a state dict that are as wanted, by key; what is not there or otherwise is added to the lists."""
    matching: dict[str, Tensor] = {}
    for key, stored in wanted.items():
        tensor = state.get(prefix + key)
        if tensor is None:
            missing.append(prefix + key)
        elif not isinstance(tensor, Tensor) or tensor.shape != stored.shape or tensor.dtype != stored.dtype:
            what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            errors.append(f"{prefix + key}: found {what}; allowed: {stored.dtype} {list(stored.shape)}")
        else:
            matching[key] = tensor
    return matching


def stored_passes(state: Mapping[str, Tensor], scheme: Codebook, k: int, device: torch.device) -> list[RotatedCodebook]:
    """The passes of a state dict's tensors, indices unpacked on the device."""
    return [
        RotatedCodebook(
            packing.unpack(state[indices].to(device), bits, k),
            state[norms],
            state[values],
            scheme.group_columns(k),
            scheme.rotation,
            seed,
            state.get(NORM_SCALE),
        )
        for bits, seed, (indices, norms, values) in zip(scheme.widths, scheme.seeds, PASS_KEYS, strict=False)
    ]
