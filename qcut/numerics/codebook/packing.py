"""Codebook indices packed to 2, 3 or 4 bits in plain order, as checkpoints hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, ShapeError

BITS = (2, 3, 4)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` indices of 2, 3 or 4 bits take, rounded up; eight 3-bit indices fill three bytes."""
    if bits == 3:
        return -(-count // 8) * 3
    return -(-count * bits // 8)


def pack(indices: Tensor, bits: int) -> Tensor:
    """Packs indices along the last dimension, the first index in the lowest bits of a byte.

    Args:
        indices: uint8 ``[..., K]``, each below ``2**bits``.
        bits: 2, 3 or 4; ``byte = idx[2j] | idx[2j + 1] << 4`` at 4 bits, eight indices to three bytes at 3.

    Returns:
        uint8 ``[..., packed_bytes(K, bits)]``, zero beyond the last index.

    Raises:
        ConfigError: ``bits`` is not 2, 3 or 4.
        DtypeError: the indices are not uint8.
        ShapeError: an index is ``2**bits`` or more.
    """
    _check_bits(bits)
    if indices.dtype is not torch.uint8:
        raise DtypeError(f"indices are {str(indices.dtype).removeprefix('torch.')}; allowed: uint8")
    if indices.numel() and int(indices.max()) >= 1 << bits:
        raise ShapeError(f"an index is {int(indices.max())}; {bits} bits hold 0 to {(1 << bits) - 1}")
    per_group, group_bytes = _group(bits)
    k = indices.shape[-1]
    groups = torch.nn.functional.pad(indices, (0, -k % per_group)).unflatten(-1, (-1, per_group)).to(torch.int32)
    words = sum(groups[..., i] << (bits * i) for i in range(per_group))
    out = torch.stack([(words >> (8 * i)) & 255 for i in range(group_bytes)], -1)  # type: ignore[operator]
    return out.flatten(-2).to(torch.uint8)


def unpack(packed: Tensor, bits: int, k: int) -> Tensor:
    """The indices that `pack` packed.

    Args:
        packed: uint8 ``[..., packed_bytes(k, bits)]``.
        bits: 2, 3 or 4.
        k: number of indices in a row.

    Returns:
        uint8 ``[..., k]``.

    Raises:
        ConfigError: ``bits`` is not 2, 3 or 4.
        ShapeError: a row has fewer or more bytes than k indices take.
    """
    _check_bits(bits)
    if packed.shape[-1] != packed_bytes(k, bits):
        raise ShapeError(f"{packed.shape[-1]} bytes a row; {k} indices of {bits} bits take {packed_bytes(k, bits)}")
    per_group, group_bytes = _group(bits)
    groups = packed.unflatten(-1, (-1, group_bytes)).to(torch.int32)
    words = sum(groups[..., i] << (8 * i) for i in range(group_bytes))
    out = torch.stack([(words >> (bits * i)) & ((1 << bits) - 1) for i in range(per_group)], -1)  # type: ignore[operator]
    return out.flatten(-2)[..., :k].to(torch.uint8)


def _group(bits: int) -> tuple[int, int]:
    """The fewest indices that fill whole bytes, and the number of these bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ConfigError(f"indices of {bits} bits; allowed: 2, 3, 4")
