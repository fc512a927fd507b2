"""How far a kernel's float result may lie from the exact one: bounds that follow from the arithmetic.

Exact values are float64. A bound adds the roundings of the kernel's float32 arithmetic, of its 16-bit intermediate
values, and of the result. Results of integer arithmetic have no bound: they are equal bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Near(NamedTuple):
    """An exact result and the distance that a kernel's may have from it.

    Attributes:
        exact: float64.
        within: float64 of the same shape.
    """

    exact: Tensor
    within: Tensor

    @classmethod
    def rounded(cls, exact: Tensor, slack: Tensor, dtype: torch.dtype) -> Near:
        """A value that is off by up to ``slack``, then rounded to ``dtype``."""
        return cls(exact, slack + half_ulp(exact.abs() + slack, dtype))


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding a float64 value to ``dtype``."""
    info, exponent = torch.finfo(dtype), torch.frexp(value).exponent - 1
    spacing = torch.ldexp(torch.full_like(value, info.eps), exponent)
    return spacing.clamp(min=info.smallest_normal * info.eps) / 2


def w8a16(x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor) -> Near:
    """A product of 16-bit tokens with int8 weights: float32 sums in any order, a scale, a bias."""
    rows, weight, k = x.double(), qweight.double(), x.shape[1]
    exact = (rows @ weight.t()) * scale.double() + bias.double()
    sizes = (rows.abs() @ weight.abs().t()) * scale.double() + bias.abs().double()
    return Near.rounded(exact, sizes * ((k + 4) * 2.0**-23), x.dtype)


def codebook(exact: Tensor, sizes: Tensor, tokens: Tensor, columns: int, dtype: torch.dtype) -> Near:
    """A product of 16-bit tokens with codebook weights.

    A kernel rounds each weight to the tokens' type, once, and sums in float32.

    Args:
        exact: the result.
        sizes: the sum of the magnitudes of all terms of each result, and of the bias.
        tokens: the sum of the magnitudes of each token times the channel's scale, as ``exact``.
        columns: terms of a sum.
        dtype: type of tokens and result.
    """
    weight = half_ulp(torch.tensor(1.0, dtype=torch.float64, device="cpu"), dtype)
    smallest = half_ulp(torch.tensor(0.0, dtype=torch.float64, device="cpu"), dtype)
    slack = sizes * (weight + (columns + 8) * 2.0**-23) + tokens * smallest
    return Near.rounded(exact, slack, dtype)


def norm(s: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Near:
    """The norm of rows, a LayerNorm where there is a bias, else an RMSNorm."""
    rows, w, k, dtype = s.double(), weight.double(), s.shape[1], s.dtype
    if bias is not None:
        exact = F.layer_norm(rows, (k,), w, bias.double(), eps)
        sizes, rounding = (exact - bias.double()).abs() + 4 * w.abs(), 0.0 * w
    else:
        scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        exact = scaled * w
        # The quotient is rounded before the weight multiplies it, to either side of a power of two.
        sizes, rounding = exact.abs(), half_ulp(scaled.abs() * (1 + 2.0**-10), dtype) * w.abs()
    # A sum of k squares errs by k 2**-24 of itself; a few roundings of float32 follow.
    return Near.rounded(exact, sizes * ((k + 16) * 2.0**-23) + rounding + 1e-6, dtype)


def gelu_tanh(x: Tensor) -> Near:
    """GELU by its hyperbolic tangent; a kernel's sigmoid is within ``2**-21``."""
    rows = x.double()
    exact = rows * (2 * (2 / torch.pi) ** 0.5 * (rows + 0.044715 * rows**3)).sigmoid()
    return Near.rounded(exact, rows.abs() * 2.0**-21, x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Near:
    """SiLU of the gate, rounded, times ``up``."""
    rows, factor = gate.double(), up.double()
    silu = rows * rows.sigmoid()
    slack = rows.abs() * 2.0**-21
    slack = (slack + half_ulp(silu.abs() + slack, gate.dtype)) * factor.abs()
    return Near.rounded(silu * factor, slack, gate.dtype)


def rotate_dense(x: Tensor, matrix: Tensor) -> Near:
    """Rows ``[M, G, d]`` times a matrix ``[G, d, d]`` for each group, 16-bit values in float32 sums of any order."""
    rows, turn = x.double(), matrix.double()
    exact = torch.einsum("mgk,gnk->mgn", rows, turn)
    sizes = torch.einsum("mgk,gnk->mgn", rows.abs(), turn.abs())
    return Near.rounded(exact, sizes * ((x.shape[2] + 4) * 2.0**-23), x.dtype)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    positions: Tensor,
    scale: float,
) -> Near:
    """Attention of a query of each sequence to its cache.

    A score errs by ``head * 2**-23`` of its terms' sizes, an exponential by ``2**-21``, a sum of T terms by
    ``T * 2**-23`` of its size. An error of a score is the same share of its weight, and weights add up to 1. Tensor
    cores round every eight products once more. They take weights in 16 bits: each errs by a share of itself, and below
    ``2**-14`` of the largest by half a step, in units in which the largest, with an int8 cache times its scale, is 1.

    Args:
        q: ``[B, heads, head]``.
        keys: ``[B, kv_heads, context, head]``.
        values: as ``keys``.
        key_scales: float32 ``[B, kv_heads, context]`` of an int8 cache, else None.
        value_scales: as ``key_scales``.
        positions: int32 ``[B]``, the last place of each sequence.
        scale: multiplies scores.
    """
    dtype, (_, heads, head), kv_heads = q.dtype, q.shape, keys.shape[1]
    half = dtype is not torch.float32
    exact, within = (
        torch.empty(q.shape, dtype=torch.float64, device="cpu"),
        torch.empty(q.shape, dtype=torch.float64, device="cpu"),
    )
    for b, position in enumerate(positions.tolist()):
        mine = q[b].view(kv_heads, heads // kv_heads, head).double()
        k, v = (t[b, :, : position + 1].double() for t in (keys, values))
        stored = v
        if key_scales is not None and value_scales is not None:
            k, v = (t * s[b, :, : position + 1, None].double() for t, s in ((k, key_scales), (v, value_scales)))
        weights = (mine @ k.transpose(1, 2) * scale).softmax(-1)
        want = weights @ v
        sizes = (mine.abs() @ k.abs().transpose(1, 2)) * scale
        share = (1.25 * head + 8) * 2.0**-23 * sizes.amax(-1, keepdim=True)
        share = share + 2.0**-20 + 1.25 * (position + 64) * 2.0**-23
        slack = 2 * share * (weights @ v.abs())
        if half:
            slack = slack + 2 * half_ulp(torch.tensor(1.0, dtype=torch.float64, device="cpu"), dtype) * (
                weights @ v.abs()
            )
            steps = v.abs().sum(1, keepdim=True)
            if value_scales is not None:
                largest = value_scales[b, :, : position + 1].double().amax(1)[:, None, None]
                steps = largest * stored.abs().sum(1, keepdim=True)
            step = half_ulp(torch.tensor(0.0, dtype=torch.float64, device="cpu"), dtype)
            slack = slack + step * (steps + (position + 1) * want.abs())
        near = Near.rounded(want, slack, dtype)
        exact[b], within[b] = near.exact.view(heads, head), near.within.view(heads, head)
    return Near(exact, within)
