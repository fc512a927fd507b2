"""The tensors of a codebook layer: what its kernels read, made from passes, and what its state dict holds.

A *set* is what one product reads: all passes of one width, behind one another along K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qcut.codebooks import layout as codebook_layout
from qcut.codebooks import packing
from qcut.codebooks.layout import UNIT_COLUMNS, Geometry
from qcut.codebooks.quantizer import RotatedCodebook
from qcut.codebooks.rotation import NO_ROTATION
from qcut.config import Codebook
from qcut.layers.base import Stored

PASS_KEYS = (("indices", "norms", "codebook"), ("residual_indices", "residual_norms", "residual_codebook"))
"""Keys of the state dict, of the first pass and of the second."""


def empty_set(
    n: int, units: int, bits: int, geometry: Geometry, int8: bool, device: torch.device | str | None
) -> dict[str, Tensor]:
    """The buffers of a set, uninitialized; see `qcut.layers.codebook.CodebookLinear`.

    Args:
        n: rows of the weight.
        units: of 128 columns along K, those of all its passes.
        bits: of an index.
        geometry: of a pass.
        int8: products are of int8.
        device: of the buffers.
    """
    tiles = codebook_layout.row_tiles(n)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "units": ((tiles, units, codebook_layout.unit_bytes(bits)), torch.uint8),
        "packed_norms": ((tiles, units, UNIT_COLUMNS // geometry.slot, 8, 2), torch.float16),
        "codebook": ((1 << bits,), torch.float32),
        "col_scale": ((n,), torch.float32),
    }
    if int8:
        shapes["fold"] = ((tiles * codebook_layout.UNIT_ROWS,), torch.float32)
    return {key: torch.empty(shape, dtype=dtype, device=device) for key, (shape, dtype) in shapes.items()}


def packed_set(
    passes: Sequence[RotatedCodebook], norms: Tensor, bits: int, geometry: Geometry, int8: bool
) -> dict[str, Tensor]:
    """The buffers of a set, from its passes, as new tensors on the norms' device.

    Args:
        passes: of one width, and with one codebook; their own norms are not looked at.
        norms: float16 or float32 ``[N, passes * G]``, finite and not negative.
        bits: of an index.
        geometry: of a pass.
        int8: products are of int8.
    """
    device, first = norms.device, passes[0]
    exponents = codebook_layout.row_exponents(norms)
    parts = norms.split(geometry.groups, 1)
    packed_norms = torch.cat([codebook_layout.pack_norms(part, exponents, geometry) for part in parts], 1)
    values = first.values.to(device, torch.float32, copy=True)
    col_scale = exponents if first.rotation == NO_ROTATION else exponents * geometry.full**-0.5
    packed = {
        "units": torch.cat([codebook_layout.pack_units(q.indices.to(device), bits, geometry) for q in passes], 1),
        "packed_norms": packed_norms,
        "codebook": values,
        "col_scale": col_scale,
    }
    if int8:
        book = torch.nn.functional.pad(values.half(), (0, 16 - len(values)))
        fold = codebook_layout.fold_scales(packed_norms, book)
        rows = fold[: len(norms)]
        packed["col_scale"] = torch.where(rows > 0, col_scale / rows, 0.0)
        packed["fold"] = fold
    return packed


def matching_state(
    state: Mapping[str, Any], prefix: str, wanted: Mapping[str, Stored], missing: list[str], errors: list[str]
) -> dict[str, Tensor]:
    """The tensors of a state dict that are as wanted, by key; what is not there or otherwise is added to the lists."""
    found: dict[str, Tensor] = {}
    for key, stored in wanted.items():
        tensor = state.get(prefix + key)
        if tensor is None:
            missing.append(prefix + key)
        elif not isinstance(tensor, Tensor) or tensor.shape != stored.shape or tensor.dtype != stored.dtype:
            what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            errors.append(f"{prefix + key}: found {what}; allowed: {stored.dtype} {list(stored.shape)}")
        else:
            found[key] = tensor
    return found


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
        )
        for bits, seed, (indices, norms, values) in zip(scheme.widths, scheme.seeds, PASS_KEYS, strict=False)
    ]
