"""int16 tokens with int8 weights (16×8) in plain torch: the definition that every kernel of theirs is compared with.

A token's element is ``a = 256 * high + low`` with both halves int8, so that the product of a token with a row of
weights is two products of int8. The largest magnitude of a token becomes 32,639 = 256 * 127 + 127 rather than 32,767,
which would have a high half of 128. Sums are exact: those of the halves in int32, their combination in int64, which is
rounded to float32 once. Float arithmetic is that of `qcut.numerics.int8`.

Source: docs/schemes.md, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics import int8
from qcut.schemes import StaticRange

SMALLEST_SCALE = 2.0**-126
"""The least scale, the smallest normal float32: the reciprocal of a smaller one may be infinite."""
LARGEST = 32_639
"""The largest magnitude of a quantized token's elements."""
TOKENS_PER_BLOCK = 8
"""Tokens with halves in one block of 16 rows: eight of high halves, then eight of low ones."""


def scale_of(largest: Tensor, most: float) -> Tensor:
    """``max(largest / most, 2**-126)``: the scale with which a magnitude becomes ``most``, float32 like ``largest``."""
    # On CUDA torch multiplies by the rounded reciprocal of a Python scalar.
    divisor = torch.full((), float(most), device=largest.device, dtype=torch.float32)
    return (largest / divisor).clamp_(min=SMALLEST_SCALE)


def quantize_tokens_ref(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """Quantizes each row by its own largest magnitude.

    ``scale[m] = max(max_k |f32(x[m, k])| / 32639, 2**-126)``, and 1 for a row of zeros,
    ``q = rne(f32(x) * (1 / scale[m]))``, with a magnitude of 32,639 at most. The product with the reciprocal moves a
    quotient by ``2**-8`` of a step at most, and is one operation where a division is ten.

    A row that holds NaN or Inf gets the scale NaN and zeros, so that its output row is NaN: one bad token does not
    change the others.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; M may be 0.
        k_padded: columns of ``q``, at least K; those past K are 0.

    Returns:
        ``q`` int16 ``[M, k_padded]`` and ``scale`` float32 ``[M]``.

    Exactness: bitwise.
    """
    x = x.float()
    absmax = x.abs().amax(1)
    scale = scale_of(absmax, LARGEST).masked_fill_(absmax == 0, 1.0).masked_fill_(~absmax.isfinite(), math.nan)
    inverse = torch.ones_like(scale) / scale
    q = torch.zeros(x.shape[0], k_padded, dtype=torch.int16, device=x.device)
    q[:, : x.shape[1]] = (x * inverse[:, None]).round_().nan_to_num_(nan=0.0)
    return q, scale


def static_scale(lo: float, hi: float, most: float = LARGEST) -> float:
    """The scale of a calibrated range: ``max(max(-lo, hi) / most, 2**-126)`` in float32, and 1 where both are 0.

    Args:
        lo: finite, at most 0.
        hi: finite, at least 0.
        most: the largest magnitude of a quantized token's elements.

    Returns:
        The scale, exactly representable in float32.

    Raises:
        ConfigError: the range does not hold zero, or is too wide for float32.

    Exactness: bitwise.
    """
    StaticRange(lo, hi)  # raises
    largest = torch.tensor(max(-lo, hi), dtype=torch.float32, device="cpu")
    if not largest.isfinite():
        raise ConfigError(f"static range [{lo}, {hi}] is too wide for float32")
    return 1.0 if largest == 0 else float(scale_of(largest, most))


def quantize_tensor_ref(x: Tensor, scale: float, k_padded: int) -> Tensor:
    """Quantizes all tokens with one calibrated scale.

    ``q = clamp(rne(f32(x) * (1 / scale)), -32639, 32639)``; NaN becomes 0, and ±Inf saturates.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; M may be 0.
        scale: positive, from 2**-126 on.
        k_padded: columns of ``q``, at least K; those past K are 0.

    Returns:
        int16 ``[M, k_padded]``.

    Exactness: bitwise.
    """
    inverse = torch.ones((), device=x.device, dtype=torch.float32) / torch.full(
        (), scale, device=x.device, dtype=torch.float32
    )
    q = torch.zeros(x.shape[0], k_padded, dtype=torch.int16, device=x.device)
    q[:, : x.shape[1]] = (x.float() * inverse).round_().nan_to_num_(nan=0.0).clamp_(-LARGEST, LARGEST)
    return q


def halves(q: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 halves of int16: ``q = 256 * high + low``, ``low`` from -128 to 127.

    Args:
        q: int16 of any shape, values from -32768 to 32639.

    Returns:
        ``high`` and ``low``, int8 of q's shape.

    Exactness: bitwise.
    """
    low = q.to(torch.int8)  # the low byte, as a signed number
    return ((q.int() - low.int()) >> 8).to(torch.int8), low


def rows_of_blocks(tokens: int) -> int:
    """Rows of `in_blocks` for a number of tokens."""
    return -(-tokens // TOKENS_PER_BLOCK) * 2 * TOKENS_PER_BLOCK


def in_blocks(q: Tensor) -> Tensor:
    """The halves of int16 tokens as rows of int8, as kernels take them.

    Args:
        q: int16 ``[M, K]``, values from -32768 to 32639.

    Returns:
        int8 ``[16 * ceil(M / 8), K]``: for each eight tokens their high halves, then their low halves. Rows of tokens
        past M are 0.

    Exactness: bitwise.
    """
    m, k = q.shape
    blocks = -(-m // TOKENS_PER_BLOCK)
    rows = torch.zeros(blocks, 2, TOKENS_PER_BLOCK, k, dtype=torch.int8, device=q.device)
    for half, values in enumerate(halves(q)):
        padded = rows.new_zeros(blocks * TOKENS_PER_BLOCK, k)
        padded[:m] = values
        rows[:, half] = padded.view(blocks, TOKENS_PER_BLOCK, k)
    return rows.view(-1, k)


def sums_ref(q: Tensor, qweight: Tensor) -> Tensor:
    """Exact sums of products, ``sum_k q[m, k] * qweight[n, k]``.

    Args:
        q: int16 ``[M, K]``, values from -32768 to 32639; M may be 0.
        qweight: int8 ``[N, K]``, K at most `qcut.schemes.K_MAX`.

    Returns:
        int64 ``[M, N]``.

    Exactness: exact.
    """
    high, low = (int8.matmul_s8(half, qweight).long() for half in halves(q))
    return high.mul_(256).add_(low)


def int16x8_linear_ref(
    x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """``y = act(f32(acc) * s_x[m] * s_w[n] + b[n])`` on int16 tokens with a scale each, ``acc`` in int64.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]`` or None.
        activation: see `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: as `qcut.numerics.int8.gemm_s8_ref`. A row's result does not depend on the other rows.
    """
    q, x_scale = quantize_tokens_ref(x, qweight.shape[1])
    return int8.epilogue_ref(
        sums_ref(q, qweight).float(),
        row_scale=x_scale,
        col_scale=weight_scale,
        bias=bias,
        activation=activation,
        out_dtype=x.dtype,
    )


def int16x8_static_linear_ref(
    x: Tensor, qweight: Tensor, col_scale: Tensor, bias: Tensor | None, x_scale: float, activation: str
) -> Tensor:
    """``y = act(f32(acc) * col_scale[n] + b[n])`` on int16 tokens with one calibrated scale, ``acc`` in int64.

    Args (the others and Returns as `int16x8_linear_ref`):
        col_scale: float32 ``[N]``, the rounded product ``x_scale * weight_scale[n]``.
        x_scale: scale of the activations.

    Exactness: as `int16x8_linear_ref`.
    """
    return int8.epilogue_ref(
        sums_ref(quantize_tensor_ref(x, x_scale, qweight.shape[1]), qweight).float(),
        row_scale=None,
        col_scale=col_scale,
        bias=bias,
        activation=activation,
        out_dtype=x.dtype,
    )
