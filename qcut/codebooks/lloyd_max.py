"""Lloyd-Max codebooks for the normal distribution, and their indices packed to 2, 3 or 4 bits."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, ShapeError

BITS = (1, 2, 3, 4)
_TOLERANCE = 1e-15
_MAX_STEPS = 10_000  # 16 levels take 2,009


@cache
def levels(bits: int) -> tuple[float, ...]:
    """The ``2**bits`` values that represent N(0, 1) with the least mean squared error, ascending.

    Each is the mean of the normal distribution over the interval between the midpoints to its neighbours.

    Args:
        bits: 1 to 4.

    Raises:
        ConfigError: another number of bits.

    Exactness: a fixed point of that condition in float64, symmetric bit by bit.

    Source: Lloyd, "Least squares quantization in PCM" (1957/1982), method I; Max, "Quantizing for minimum distortion"
    (1960), whose table of errors is exact to three digits: at 4 bits it has 0.009497, the least is 0.009501.
    """
    _check_bits(bits)
    count = 1 << (bits - 1)  # the positive half
    values = [3 * (i + 0.5) / count for i in range(count)]
    for _ in range(_MAX_STEPS):
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(values)), math.inf]
        pairs = list(pairwise(edges))
        means = [(normal_density(low) - normal_density(high)) / (_below(high) - _below(low)) for low, high in pairs]
        moved = max(abs(a - b) for a, b in zip(values, means, strict=True))
        values = means
        if moved < _TOLERANCE:
            break
    return (*(-v for v in reversed(values)), *values)


def codebook(bits: int, device: torch.device | str | None = None) -> Tensor:
    """float32 ``[2**bits]``: `levels`, rounded."""
    return torch.tensor(levels(bits), dtype=torch.float32, device=device)


def boundaries(values: Tensor) -> Tensor:
    """Midpoints ``[n - 1]`` between ascending values ``[n]``, in their dtype: what `torch.searchsorted` goes by."""
    return (values[1:] + values[:-1]) / 2


def distortion(bits: int) -> float:
    """Mean squared error of `levels` on N(0, 1)."""
    values = levels(bits)
    edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(values)), math.inf]
    shares = [_below(high) - _below(low) for low, high in pairwise(edges)]
    return 1.0 - math.fsum(share * value**2 for share, value in zip(shares, values, strict=True))


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` indices of 2, 3 or 4 bits take: whole bytes, 3-bit indices in groups of eight."""
    if bits == 3:
        return -(-count // 8) * 3
    return -(-count * bits // 8)


def pack(indices: Tensor, bits: int) -> Tensor:
    """Packs the last dimension, the first index in the lowest bits.

    Args:
        indices: uint8 ``[..., K]``, each below ``2**bits``.
        bits: 2, 3 or 4; ``byte = idx[2j] | idx[2j + 1] << 4`` at 4 bits, eight indices to three bytes at 3.

    Returns:
        uint8 ``[..., packed_bytes(K, bits)]``, zero beyond the last index.

    Raises:
        ConfigError: other widths.
        DtypeError: indices of another dtype.
        ShapeError: an index of ``2**bits`` or more.
    """
    _check_packing(bits)
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
    """uint8 ``[..., k]``: what `pack` packed.

    Raises:
        ConfigError: other widths than 2, 3 and 4.
        ShapeError: fewer or more bytes than k indices take.
    """
    _check_packing(bits)
    if packed.shape[-1] != packed_bytes(k, bits):
        raise ShapeError(f"{packed.shape[-1]} bytes a row; {k} indices of {bits} bits take {packed_bytes(k, bits)}")
    per_group, group_bytes = _group(bits)
    groups = packed.unflatten(-1, (-1, group_bytes)).to(torch.int32)
    words = sum(groups[..., i] << (8 * i) for i in range(group_bytes))
    out = torch.stack([(words >> (bits * i)) & ((1 << bits) - 1) for i in range(per_group)], -1)  # type: ignore[operator]
    return out.flatten(-2)[..., :k].to(torch.uint8)


def _group(bits: int) -> tuple[int, int]:
    """The fewest indices that fill whole bytes, and those bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)


def normal_density(x: float) -> float:
    """Of N(0, 1)."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ConfigError(f"a codebook of {bits} bits; allowed: {', '.join(map(str, BITS))}")


def _check_packing(bits: int) -> None:
    if bits not in (2, 3, 4):
        raise ConfigError(f"indices of {bits} bits; allowed: 2, 3, 4")
