"""Rotates tokens for codebook products: the reference in plain torch, and the operands that kernels read.

For each group g of d_g columns, where a full group has d columns, in float32::

    hadamard  r[g] = walsh_hadamard(x[g] * signs(d_g, seed + first column)) * f32(sqrt(d) / d_g)
    qr        r[g] = (x[g] @ haar(d_g, seed + first column)^T) * f32(sqrt(d / d_g))
    none      r[g] = x[g]

The product with the codebook values is then divided by ``sqrt(d)`` for all groups, the shorter last one too. Passes,
each with a seed of its own, follow one another along K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, ShapeError
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.rotation import Kind
from qcut.numerics.int8 import quantize_per_token_ref
from qcut.numerics.plain_state import in_plain_state

_INPUTS = (torch.float16, torch.bfloat16, torch.float32)
_OUTPUTS = (*_INPUTS, torch.int8)
_TILE = 16  # sides of qr's matrices are padded to the tile of a tensor core


def rotate_tokens(
    x: Tensor, kind: Kind, group_size: int, seeds: Sequence[int], out: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Rotate tokens, and round them to 16 bits or quantize them by row.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32, any strides; M may be 0.
        kind: hadamard, qr or none.
        group_size: columns of a group; K or more takes whole rows. Hadamard groups, the shorter last one too, are
            powers of two.
        seeds: a seed for each pass. Without a rotation only the number of seeds counts.
        out: float16, bfloat16, float32 or int8. With int8, `qcut.numerics.int8.quantize_per_token_ref` quantizes each
            row, all passes together.

    Returns:
        ``[M, passes * k_padded]`` (see `qcut.numerics.codebook.layout.Geometry`), zero padded, not yet in the order of
        `to_blocks`; and the scales, float32 ``[M]`` with int8, else None.

    Raises:
        ShapeError: x is not a matrix, or has no columns.
        DtypeError: another dtype of x or ``out``.
        ConfigError: another kind, a group that the rotation cannot take, no seed.

    Exactness: ``hadamard`` and ``none`` are defined bitwise, with one rounding after the last product; ``qr`` sums
    float32 products in the order of the device's matrix product.
    """
    if x.dim() != 2 or x.shape[1] < 1:
        raise ShapeError(f"tokens are {list(x.shape)}; allowed: [M, K] with K of 1 and more")
    if x.dtype not in _INPUTS or out not in _OUTPUTS:
        raise DtypeError(
            f"tokens are {x.dtype} and become {out}; allowed: float16, bfloat16, float32, which may become int8, too"
        )
    geometry = _geometry(x.shape[1], kind, group_size, seeds)
    places = geometry.columns(x.device)
    rows = torch.zeros((len(x), len(seeds), geometry.k_padded), dtype=torch.float32, device=x.device)
    for number, seed in enumerate(seeds):
        rotated = x if kind == "none" else rotation.rotate_groups(x, kind, group_size, seed, as_full=True)
        rows[:, number, places] = rotated.float()
    flat = rows.flatten(1)
    if out is torch.int8:
        return quantize_per_token_ref(flat, flat.shape[1])
    return flat.to(out), None


def quantize_rotated_ref(x: Tensor, group_size: int, seed: int, k_padded: int) -> tuple[Tensor, Tensor]:
    """Rotates tokens by groups of columns, and quantizes each by its own largest magnitude afterwards.

    `qcut.numerics.int8.quantize_per_token_ref` of `qcut.numerics.codebook.rotation.rotate_groups` of kind ``hadamard``.
    Unlike those of `rotate_tokens`, a shorter last group has a rotation without a further factor.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32, any strides; M may be 0.
        group_size: columns of a group; K or more takes whole rows. All groups are powers of two.
        seed: of the group at column 0.
        k_padded: columns of ``q``, at least K; those past K are 0.

    Returns:
        ``q`` int8 ``[M, k_padded]`` and ``scale`` float32 ``[M]``.

    Raises:
        ConfigError: a group that the rotation cannot take.

    Exactness: bitwise.
    """
    return quantize_per_token_ref(rotation.rotate_groups(x, "hadamard", group_size, seed), k_padded)


@functools.cache
def operand_layout(
    kind: Kind, group_size: int, k: int, dtype: torch.dtype, passes: int
) -> tuple[tuple[torch.dtype, ...], tuple[int, ...]]:
    """Dtypes and shape that `operands` have for tokens ``[M, K]`` of a dtype; ``kind`` is hadamard or qr."""
    geometry = Geometry(k, group_size, kind)
    if kind == "hadamard":
        return (torch.int32,), (passes, geometry.k_padded // 32)
    side = -(-geometry.full // _TILE) * _TILE
    matrices = dtype if dtype is torch.bfloat16 else torch.float16
    return (matrices,), (passes, geometry.groups, side, side)


@in_plain_state
def operands(
    kind: Kind,
    group_size: int,
    k: int,
    seeds: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """The operands that a rotation's kernel reads besides tokens. They are constant; the caller keeps them.

    Args:
        kind: hadamard, qr or none.
        group_size: see `rotate_tokens`.
        k: number of columns.
        seeds: a seed for each pass.
        dtype: dtype of the tokens and of qr's matrices: float16 or bfloat16.
        device: device of the result.

    Returns:
        - hadamard: int32 ``[passes, k_padded / 32]``; bit j of word w is set where column ``32 w + j`` in memory
          changes its sign; padding is 0.
        - qr: ``[passes, groups, d, d]`` of dtype, d the columns of a full group rounded up to a multiple of 16:
          ``haar * sqrt(d / d_g)`` rounded once, 0 beyond a group's columns.
        - none: an empty int32 tensor.

    Raises:
        DtypeError: another dtype for qr's matrices.
        ConfigError: see `rotate_tokens`.
    """
    geometry = _geometry(k, kind, group_size, seeds)
    parts = rotation.groups(k, geometry.full)
    if kind == "none":
        return torch.empty(0, dtype=torch.int32, device=device)
    if kind == "hadamard":
        negative = torch.zeros(len(seeds), geometry.k_padded, dtype=torch.int64, device="cpu")
        for number, seed in enumerate(seeds):
            negative[number, geometry.columns()] = (rotation.group_signs(k, group_size, seed) < 0).long()
        words = (negative.view(len(seeds), -1, 32) << torch.arange(32, dtype=torch.int64, device="cpu")).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).to(device)
    if dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(f"matrices of {dtype}; allowed: float16, bfloat16")
    side = -(-geometry.full // _TILE) * _TILE
    matrices = torch.zeros(len(seeds), len(parts), side, side, dtype=dtype, device="cpu")
    for number, seed in enumerate(seeds):
        for group, (first, d) in enumerate(parts):
            scaled = rotation.haar(d, seed + first).double() * math.sqrt(geometry.full / d)
            matrices[number, group, :d, :d] = scaled.to(dtype)
    return matrices.to(device)


def _geometry(k: int, kind: str, group_size: int, seeds: Sequence[int]) -> Geometry:
    if not seeds:
        raise ConfigError("no seeds; allowed: one for each pass, 1 and more")
    if kind != "none":
        rotation.check_group_size(k, group_size, kind)
    return Geometry(k, group_size, kind)
