"""Chooses the next token from logits, in plain torch: the definition that a kernel equals token for token.

A draw depends on the seed, the sequence and the position alone. The exponential is written as float32 operations, each
rounded by itself, and its results are made integers, whose sums are exact in every order. Tokens are therefore the same
on every device and in every batch, except under ``torch.compile``, which contracts float operations. No function reads
a tensor on the host, so that a CUDA graph can capture each function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qcut.errors import ConfigError, DeviceError, DtypeError, ShapeError

MAX_VOCABULARY = 1 << 22
"""Most logits in a row: 2**22 weights of at most 2**40 add up to 2**62, which int64 holds."""

_MASK32, _MASK24 = 0xFFFF_FFFF, 0xFF_FFFF
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 2.0**-126, float.fromhex("0x1.fffffep+127")  # float32's normal numbers

_LOG2_E = float.fromhex("0x1.715476p+0")
_LN_2_HIGH = float.fromhex("0x1.62e4p-1")  # 15 bits: its products with whole numbers up to 40 are exact
_LN_2_LOW = float.fromhex("0x1.7f7d1cp-20")
_EXP_TERMS = tuple(1 / math.factorial(k) for k in range(7, -1, -1))


@dataclass(frozen=True)
class Sampling:
    """The settings by which a token is chosen.

    Attributes:
        temperature: divisor of the logits, a positive normal number of float32; 0 always chooses the largest logit.
        top_k: number of largest logits to draw from; 0 keeps all.
        top_p: the draw is from the fewest likeliest tokens whose probabilities sum to this or more, in (0, 1], rounded
            to 24 bits; 1 keeps all.
        seed: key of the random draws, in [0, 2**64).

    Raises:
        ConfigError: a value lies outside its range, or is negative.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE:
            raise ConfigError(f"temperature {self.temperature!r}; allowed: 0 (greedy), or 2**-126 to float32's largest")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k!r}; allowed: an integer of at least 0 (0 keeps all)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p!r}; allowed: 0 < top_p <= 1 (1 keeps all)")
        _check_seed(self.seed)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen, without a draw."""
        return self.temperature == 0


def philox(counter: Tensor, key: int) -> Tensor:
    """Philox4x32-10: 128 random bits of a counter and a key.

    Args:
        counter: int64 ``[..., 4]``, each word modulo 2**32.
        key: in [0, 2**64); its low 32 bits are the key's first word, its high ones the second.

    Returns:
        int64 ``[..., 4]`` of words in [0, 2**32), on the counter's device.

    Raises:
        ConfigError, DtypeError, ShapeError: the key, the counter's dtype or its shape is not as above.

    Exactness: bitwise. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """
    _check_seed(key)
    if counter.dtype is not torch.int64:
        raise DtypeError(f"counter: found {counter.dtype}; allowed: torch.int64")
    if counter.shape[-1:] != (4,):
        raise ShapeError(f"counter: found shape {tuple(counter.shape)}; allowed: [..., 4]")
    c0, c1, c2, c3 = (counter & _MASK32).unbind(-1)
    k0, k1 = key & _MASK32, key >> 32
    for _ in range(10):
        high0, low0 = _wide_product(c0, 0xD251_1F53)
        high1, low1 = _wide_product(c2, 0xCD9E_8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E37_79B9) & _MASK32, (k1 + 0xBB67_AE85) & _MASK32
    return torch.stack((c0, c1, c2, c3), -1)


def uniform(seed: int, sequence: Tensor, position: Tensor) -> Tensor:
    """The random number of each token: ``(philox((position, sequence, 0, 0), seed)[0] >> 8) * 2**-24``.

    Args:
        seed: in [0, 2**64).
        sequence: int64 of any shape, the sequence's index, modulo 2**32.
        position: int64 of the same shape and device, the token's place in its sequence, modulo 2**32.

    Returns:
        float32 of that shape, uniform multiples of 2**-24 in [0, 1), on the same device.

    Raises:
        ConfigError, DeviceError, DtypeError, ShapeError: the seed or a tensor is not as above.

    Exactness: bitwise.
    """
    _check_places(sequence, position, sequence.shape, sequence.device)
    zero = torch.zeros_like(position)
    word = philox(torch.stack((position, sequence, zero, zero), -1), seed)[..., 0]
    return (word >> 8).float() * 2.0**-24


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest logit: of equal logits (-0 and 0 too) the first. NaN is never the largest.

    A row of NaN alone gives index 0.

    Args:
        logits: ``[B, V]`` of any floating-point dtype, compared as float32; B may be 0, V is 1 to 2**22.

    Returns:
        int64 ``[B]``, on the device of the logits.

    Raises:
        DtypeError, ShapeError: the logits are not as above.

    Exactness: bitwise.
    """
    if not logits.is_floating_point():
        raise DtypeError(f"logits: found {logits.dtype}; allowed: a floating-point dtype")
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        raise ShapeError(f"logits: found shape {tuple(logits.shape)}; allowed: [B, V], V in [1, {MAX_VOCABULARY}]")
    x, columns = logits.detach().float(), logits.shape[1]
    largest = x.masked_fill(x.isnan(), -math.inf).amax(1, keepdim=True)
    # torch's own argmax prefers NaN. In a row of NaN alone no element equals the largest: `columns` becomes 0.
    return torch.arange(columns, device=x.device).masked_fill(x != largest, columns).amin(1) % columns


def sample(logits: Tensor, sampling: Sampling, sequence: Tensor, position: Tensor) -> Tensor:
    """Chooses a token for each row: `argmax` where the sampling is greedy, a draw otherwise.

    1. ``x = f32(logit)``, -Inf where that is NaN. Sort x in descending order, equals (-0 and 0 too) by lower index.
    2. Keep the first ``top_k``. ``m`` is the first of them.
    3. ``d = (x - m) / f32(temperature)``: a float32 subtraction, then a float32 division.
    4. ``w = floor(exp(d) * 2**40)`` in int64, of ``max(d, -28)``. exp is float32: ``n = rne(d * 0x1.715476p+0)``,
       ``r = (d - n * 0x1.62e4p-1) - n * 0x1.7f7d1cp-20``, and p is the Taylor polynomial of exp to r**7, by Horner's
       rule from ``f32(1 / 7!)`` down: ``p = p * r + f32(1 / k!)``. Every operation is rounded by itself, none is
       contracted. ``w = int64(p * 2**40) >> -n``, and -28 gives 0.
    5. ``c[i] = w[0] + ... + w[i]`` in int64, and ``T`` is the last.
    6. Where ``top_p < 1``, keep the shortest prefix with ``c[i] >= ceil(P * T / 2**24)``, at least one token, where
       ``P = rne(top_p * 2**24)``. ``T`` becomes its sum. Quotients are exact until they are rounded.
    7. ``u = 2**24 * uniform(seed, sequence, position)``. The token is the first with ``c[i] > floor(u * T / 2**24)``.

    A weight of 0 is never chosen, so neither are -Inf and NaN. A row whose largest logit is not finite (all -Inf or
    NaN, or a +Inf) gives its `argmax`. Probabilities are exact to about 2**-24, the step of u.

    Args:
        logits: ``[B, V]`` of any floating-point dtype; B may be 0, V is 1 to 2**22.
        sampling: temperature, top_k, top_p and seed; a top_k above V keeps all.
        sequence: int64 ``[B]`` on the same device, as `uniform` takes it.
        position: int64 ``[B]`` on the same device, as `uniform` takes it.

    Returns:
        int64 ``[B]``, on the device of the logits.

    Raises:
        DeviceError, DtypeError, ShapeError: a tensor is not as above.

    Exactness: bitwise. Before its floor, w is within 2 float32 ulp of ``exp(d) * 2**40``; what follows is exact.
    """
    best = argmax(logits)
    _check_places(sequence, position, best.shape, best.device)
    if sampling.greedy:
        return best
    x = logits.detach().float() + 0.0  # -0 becomes 0, since a sort may compare bits
    x, token = x.masked_fill_(x.isnan(), -math.inf).sort(dim=1, descending=True, stable=True)
    if sampling.top_k:
        x, token = x[:, : sampling.top_k], token[:, : sampling.top_k]
    finite = x[:, :1].isfinite()
    temperature = x.new_full((), sampling.temperature)  # CUDA would multiply by the reciprocal of a Python scalar
    sums = _weights((x - x[:, :1]).masked_fill_(~finite, 0.0) / temperature).cumsum(1)
    total = sums[:, -1:]
    if sampling.top_p < 1:
        needed = _share(total, round(sampling.top_p * 2**24), rounding=_MASK24)
        total = sums.gather(1, (sums < needed).sum(1, keepdim=True))
    u = (uniform(sampling.seed, sequence, position) * 2.0**24).long()[:, None]
    rank = (sums <= _share(total, u)).sum(1, keepdim=True)
    return torch.where(finite, token.gather(1, rank), best[:, None]).squeeze(1)


def _weights(d: Tensor) -> Tensor:
    """Step 4 of `sample`: ``floor(exp(d) * 2**40)`` in int64, of float32 d at most 0."""
    d = d.clamp(min=-28.0)
    n = (d * _LOG2_E).round_()
    r = (d - n * _LN_2_HIGH).sub_(n * _LN_2_LOW)
    p = torch.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p.mul_(r).add_(term)
    return p.mul_(2.0**40).long() >> n.neg_().long()


def _share(total: Tensor, parts: Tensor | int, rounding: int = 0) -> Tensor:
    """``(parts * total + rounding) >> 24`` of total in [0, 2**62], parts in [0, 2**24] and rounding under 2**24."""
    # total = high * 2**24 + low: high * parts is at most total, low * parts under 2**48. Neither overflows.
    return (total >> 24) * parts + (((total & _MASK24) * parts + rounding) >> 24)


def _wide_product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit numbers, computed by halves so that int64 does not overflow."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def _check_places(sequence: Tensor, position: Tensor, shape: torch.Size, device: torch.device) -> None:
    for name, tensor in (("sequence", sequence), ("position", position)):
        if tensor.dtype is not torch.int64:
            raise DtypeError(f"{name}: found {tensor.dtype}; allowed: torch.int64")
        if tensor.shape != shape:
            raise ShapeError(f"{name}: found shape {tuple(tensor.shape)}; allowed: {tuple(shape)}")
        if tensor.device != device:
            raise DeviceError(f"{name}: found on {tensor.device}; allowed: {device}")


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed {seed!r}; allowed: an integer in [0, 2**64)")
