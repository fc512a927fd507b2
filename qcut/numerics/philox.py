"""Random numbers that depend on a seed, a sequence and a position: Philox, counter by counter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qcut.errors import ConfigError, DeviceError, DtypeError, ShapeError, shown

_MASK32 = 0xFFFF_FFFF


Key = int | Tensor
"""A key in [0, 2**64), or keys as their lower and upper 32 bits, int64 ``[..., 2]``: `key_words`."""


def key_words(keys: Sequence[int], device: torch.device) -> Tensor:
    """Keys, each in [0, 2**64), as int64 ``[B, 2]``: their lower and upper 32 bits.

    Raises:
        ConfigError: a key outside its range.
    """
    for key in keys:
        check_seed(key)
    return torch.tensor([(key & _MASK32, key >> 32) for key in keys], dtype=torch.int64, device=device).view(-1, 2)


def philox(counter: Tensor, key: Key) -> Tensor:
    """Philox4x32-10: 128 random bits of a counter and a key.

    Args:
        counter: int64 ``[..., 4]``, each word modulo 2**32.
        key: one for all counters, or one for each.

    Returns:
        int64 ``[..., 4]`` of words in [0, 2**32), on the counter's device.

    Raises:
        ConfigError, DtypeError, ShapeError: the key, the counter's dtype or its shape is not as above.

    Exactness: bitwise. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """
    if counter.dtype is not torch.int64:
        raise DtypeError(f"counter: found {counter.dtype}; allowed: torch.int64")
    if counter.shape[-1:] != (4,):
        raise ShapeError(f"counter: found shape {tuple(counter.shape)}; allowed: [..., 4]")
    words: tuple[Key, ...]
    if isinstance(key, Tensor):
        allowed = (*counter.shape[:-1], 2)
        if key.dtype is not torch.int64 or key.shape != allowed:
            raise ShapeError(f"key: found {key.dtype} {tuple(key.shape)}; allowed: an integer, or int64 {allowed}")
        words = key.unbind(-1)
    else:
        check_seed(key)
        words = key & _MASK32, key >> 32
    k0, k1 = words
    c0, c1, c2, c3 = (counter & _MASK32).unbind(-1)
    for _ in range(10):
        high0, low0 = _wide_product(c0, 0xD251_1F53)
        high1, low1 = _wide_product(c2, 0xCD9E_8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E37_79B9) & _MASK32, (k1 + 0xBB67_AE85) & _MASK32
    return torch.stack((c0, c1, c2, c3), -1)


def uniform(seed: Key, sequence: Tensor, position: Tensor) -> Tensor:
    """The random number of each token: ``(philox((position, sequence, 0, 0), seed)[0] >> 8) * 2**-24``.

    Args:
        seed: one for all tokens, or one for each.
        sequence: int64 of any shape, the sequence's index, modulo 2**32.
        position: int64 of the same shape and device, the token's place in its sequence, modulo 2**32.

    Returns:
        float32 of that shape, uniform multiples of 2**-24 in [0, 1), on the same device.

    Raises:
        ConfigError, DeviceError, DtypeError, ShapeError: the seed or a tensor is not as above.

    Exactness: bitwise.
    """
    check_places(sequence, position, sequence.shape, sequence.device)
    zero = torch.zeros_like(position)
    word = philox(torch.stack((position, sequence, zero, zero), -1), seed)[..., 0]
    return (word >> 8).float() * 2.0**-24


def _wide_product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit numbers, computed by halves so that int64 does not overflow."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def check_places(sequence: Tensor, position: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Check sequences and positions: int64 of a shape, on a device.

    Raises:
        DeviceError, DtypeError, ShapeError: either is of another kind.
    """
    for name, tensor in (("sequence", sequence), ("position", position)):
        if tensor.dtype is not torch.int64:
            raise DtypeError(f"{name}: found {tensor.dtype}; allowed: torch.int64")
        if tensor.shape != shape:
            raise ShapeError(f"{name}: found shape {tuple(tensor.shape)}; allowed: {tuple(shape)}")
        if tensor.device != device:
            raise DeviceError(f"{name}: found on {tensor.device}; allowed: {device}")


def check_seed(seed: int) -> None:
    """Check a seed.

    Raises:
        ConfigError: no integer in [0, 2**64).
    """
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed {shown(seed)}; allowed: an integer in [0, 2**64)")
