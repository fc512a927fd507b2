"""Linear layers on integers, in plain torch: the definition that every kernel of theirs is compared with.

A layer takes int8 or int16 tokens with a static range and gives tokens of the same type, so that a chain of layers
needs no floats. An exact sum of products plus a bias at the sums' scale, ``v = acc + bias[n]``, is rescaled by a
multiplier and a right shift::

    y = clamp(rne(v * multiplier[n] / 2**shift[n]) + zero_point, least, most)

where ``rne`` rounds to the nearest integer, halves to the even one. `rescale_ref` says so in integers. No step
overflows 64 bits: a token's magnitude is at most 2**15 and a weight's at most 2**7, so that with `K_MAX` columns
``|acc| <= 2**38``; with ``|bias| <= BIAS_MAX = 2**38 - 1`` follows ``|v| < 2**39``, and with a multiplier below 2**24
``|v * multiplier| < 2**63``.

Source: docs/schemes.md, "Chains in integers"; Jacob et al. 2018, "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", section 2.2 (rescaling by a multiplier and a shift).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics import int8, int16
from qcut.numerics.checks import out_of_range

K_MAX = 65_536
"""The most columns: sums of int16 tokens are then at most 2**38."""
BIAS_MAX = 2**38 - 1
"""The largest magnitude of a bias at the sums' scale."""
MULTIPLIER_BITS = 24
MULTIPLIER_MAX = 2**MULTIPLIER_BITS - 1
"""The largest multiplier."""
SHIFT_MAX = 62
"""The longest shift: ``2 * (2**shift - 1)`` fits 64 bits, see `rescale_ref`."""
LIMITS = {torch.int8: (-128, 127), torch.int16: (-int16.LARGEST, int16.LARGEST)}
"""The least and the largest value of a result, by type; 32,639 is the largest with a high half in int8."""


def rescale_ref(v: Tensor, multiplier: Tensor, shift: Tensor) -> Tensor:
    """``rne(v * multiplier / 2**shift)`` in 64-bit integers, halves to even.

    ``p = v * multiplier``, ``q = p >> shift`` (rounded down), ``rest = p - (q << shift)``; the result is q, or
    ``q + 1`` where ``2 * rest > 2**shift``, or where the two are equal and q is odd.

    Args:
        v: int64 ``[..., N]``, magnitudes below 2**39.
        multiplier: int32 ``[N]``, 0 to `MULTIPLIER_MAX`.
        shift: int32 ``[N]``, 0 to `SHIFT_MAX`.

    Returns:
        int64 of v's shape.

    Exactness: exact.
    """
    shift = shift.long()
    product = v * multiplier.long()
    floor = product >> shift
    twice, one = (product - (floor << shift)) * 2, torch.ones_like(shift) << shift
    return floor + ((twice > one) | ((twice == one) & (floor % 2 == 1)))


def fixed_point(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The multiplier and shift nearest to a ratio of scales.

    ``multiplier`` has 24 bits, hence a relative error of 2**-24 at most, unless the shift would be more than
    `SHIFT_MAX`: then it is that, and the multiplier is shorter. A ratio below 2**-63 has the multiplier 0.

    Args:
        ratio: float64 ``[N]``, at least 0; see `ratio_problem` for the largest.

    Returns:
        ``multiplier`` and ``shift``, int32 ``[N]`` each.

    Exactness: bitwise.
    """
    mantissa, exponent = torch.frexp(ratio)
    multiplier = (mantissa * 2.0**MULTIPLIER_BITS).round_()
    carried = multiplier > MULTIPLIER_MAX
    multiplier = torch.where(carried, multiplier / 2, multiplier)
    shift = MULTIPLIER_BITS - exponent - carried.to(exponent.dtype)
    beyond = shift > SHIFT_MAX
    multiplier = torch.where(beyond, (ratio * 2.0**SHIFT_MAX).round_(), multiplier)
    return multiplier.to(torch.int32), shift.clamp(max=SHIFT_MAX).to(torch.int32)


def ratio_problem(ratio: Tensor) -> str | None:
    """What keeps `fixed_point` from a ratio: one that is not finite, or 2**24 or more. None if nothing does."""
    return out_of_range(ratio, 0.0, float(MULTIPLIER_MAX))


def bias_at_sums(
    bias: Tensor | None, in_scale: float, weight_scale: Tensor, in_zero_point: int, colsum: Tensor
) -> Tensor:
    """A layer's bias at the scale of its sums, with what the tokens' zero point adds to them taken off.

    ``rne(bias[n] / (in_scale * weight_scale[n])) - in_zero_point * colsum[n]``, product and quotient in float64. What
    is beyond `BIAS_MAX` becomes ``±2**62``, for `state_problem` to find.

    Args:
        bias: float32 ``[N]`` or None.
        in_scale: of the tokens, representable in float32.
        weight_scale: float32 ``[N]``.
        in_zero_point: of the tokens.
        colsum: int32 ``[N]``, the weight's sums along K.

    Returns:
        int64 ``[N]``.

    Exactness: bitwise.
    """
    offset = colsum.long() * -in_zero_point
    if bias is None:
        return offset
    quotient = (bias.double() / (weight_scale.double() * in_scale)).round_()
    return torch.where(quotient.abs() <= BIAS_MAX, quotient, quotient.sign() * 2.0**62).long() + offset


def state_problem(bias: Tensor, multiplier: Tensor, shift: Tensor) -> tuple[str, str] | None:
    """Looks for values with which a product could leave 64 bits.

    Args:
        bias: int64 ``[N]``.
        multiplier: int32 ``[N]``.
        shift: int32 ``[N]``.

    Returns:
        The name of the tensor, and what was found and is allowed; None if all is well.
    """
    for name, tensor, least, most in (
        ("bias", bias, -BIAS_MAX, BIAS_MAX),
        ("multiplier", multiplier, 0, MULTIPLIER_MAX),
        ("shift", shift, 0, SHIFT_MAX),
    ):
        if found := out_of_range(tensor, least, most):
            return name, f"found {found}; {least} to {most} are allowed"
    return None


def sums_ref(q: Tensor, qweight: Tensor) -> Tensor:
    """Exact sums of products, ``sum_k q[m, k] * qweight[n, k]``.

    Args:
        q: int8 or int16 ``[M, K]``; int16 values from -32768 to 32639.
        qweight: int8 ``[N, K]``.

    Returns:
        int64 ``[M, N]``.

    Exactness: exact.
    """
    return int16.sums_ref(q, qweight) if q.dtype is torch.int16 else int8.matmul_s8(q, qweight).long()


def integer_linear_ref(
    q: Tensor,
    qweight: Tensor,
    bias: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    zero_point: Tensor | None,
    relu: bool,
) -> Tensor:
    """``y = clamp(rne((acc + bias[n]) * multiplier[n] / 2**shift[n]) + zero_point, least, most)``.

    Args:
        q: int8 or int16 ``[M, K]``; int16 values from -32768 to 32639.
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        bias: int64 ``[N]``, magnitudes up to `BIAS_MAX`.
        multiplier: int32 ``[N]``, 0 to `MULTIPLIER_MAX`.
        shift: int32 ``[N]``, 0 to `SHIFT_MAX`.
        zero_point: int32 ``[1]`` of an int8 result; None for int16, where it is 0.
        relu: whether ``least`` is the zero point, the image of 0, rather than that of `LIMITS`.

    Returns:
        ``[M, N]`` of q's type.

    Exactness: exact.
    """
    zero = q.new_zeros(1, dtype=torch.int64) if zero_point is None else zero_point.long()
    sums = sums_ref(q, qweight[:, : q.shape[1]].contiguous())
    y = rescale_ref(sums.add_(bias), multiplier, shift).add_(zero)
    least, most = LIMITS[q.dtype]
    y.clamp_(least, most)
    return (torch.maximum(y, zero) if relu else y).to(q.dtype)
