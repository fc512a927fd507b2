"""Int8 quantization and products in plain torch: the definition that every int8 kernel is compared with.

Float arithmetic is float32, one rounded operation at a time, in the order the formulas are written;
``rne`` rounds half to even. GPU kernels compute the same operations without contraction, so that
integers agree bitwise, and so do floats if the activation is ``none`` or ``relu``. A scale is the
smallest number with which the largest magnitude fits; a scale that would be 0 is 1. "Bitwise" below
means on every device.

Source: docs/schemes.md, sections 2 (W8A8) and 3 (W8A16).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from qcut.errors import ConfigError, QuantizationError
from qcut.schemes import FP8_BLOCK, FP8_UNIT_ROWS, StaticRange, check_activation

_CHUNK_ELEMENTS = 1 << 24  # weights are read in pieces, so that no float32 copy of a whole weight exists

_LEAST_NORMAL = 2.0**-126
LEAST_MAGNITUDE = 127 * _LEAST_NORMAL
"""The least that a weight's largest magnitude may be: its scale is the least normal float32."""


def _divide(numerator: Tensor, divisor: float) -> Tensor:
    # CUDA would multiply by the rounded reciprocal of a Python scalar.
    return numerator / torch.full((), divisor, dtype=torch.float32, device=numerator.device)


def _scale_from_absmax(absmax: Tensor, most: float = 127.0) -> Tensor:
    scale = _divide(absmax, most)
    return scale.masked_fill_(scale == 0, 1.0)


def weight_qparams(
    w: Tensor, *, row_absmax: Tensor | None = None, layer: str | None = None, most: float = 127.0
) -> Tensor:
    """Symmetric per-channel scales of a weight.

    ``scale[n] = max_k |f32(W[n, k])| / most``, and 1 where that is 0.

    Args:
        w: ``[N, K]`` of any floating-point dtype, N and K at least 1.
        row_absmax: float32 ``[N]``, the maximum over the columns of whole rows, if ``w`` has only some of them.
        layer: name for error messages.
        most: what a row's largest magnitude becomes.

    Returns:
        float32 ``[N]`` on the weight's device.

    Raises:
        QuantizationError: the weight is empty or holds NaN or Inf; its largest magnitude is below `LEAST_MAGNITUDE`,
            and not 0; or ``row_absmax`` is not of its rows.

    Exactness: bitwise.
    """
    if w.dim() != 2 or w.numel() == 0:
        raise QuantizationError(f"weight has shape {tuple(w.shape)}; allowed: [N, K] with N, K >= 1", layer)
    rows = max(1, _CHUNK_ELEMENTS // w.shape[1])
    absmax = torch.cat([chunk.float().abs().amax(1) for chunk in w.split(rows)])
    bad = (~absmax.isfinite()).nonzero()
    if len(bad):
        raise QuantizationError(
            f"weight holds NaN or Inf in {len(bad)} of {len(w)} rows, first in row {int(bad[0])}; "
            "every value must be finite in float32",
            layer,
        )
    if row_absmax is not None:
        if row_absmax.shape != absmax.shape or not bool(((row_absmax >= absmax) & row_absmax.isfinite()).all()):
            raise QuantizationError("row_absmax is not that of finite rows which hold these columns", layer)
        absmax = row_absmax
    largest = float(absmax.max())
    least = most * _LEAST_NORMAL
    if largest < least and bool(w.any()):
        raise QuantizationError(
            f"the weight's largest magnitude is {largest:.4g}; allowed: {least:.4g} and more, so that scales "
            "are normal numbers of float32, or only zeros",
            layer,
        )
    return _scale_from_absmax(absmax, most)


def quantize_weight(w: Tensor, *, row_absmax: Tensor | None = None, layer: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a weight symmetrically per channel.

    ``q = clamp(rne(f32(W[n, k]) / scale[n]), -127, 127)`` with `weight_qparams` as scale.

    Args and Raises: as `weight_qparams`.

    Returns:
        ``q`` int8 ``[N, K]`` and ``scale`` float32 ``[N]``, on the weight's device.

    Exactness: bitwise.
    """
    scale = weight_qparams(w, row_absmax=row_absmax, layer=layer)
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    rows = max(1, _CHUNK_ELEMENTS // w.shape[1])
    for w_i, q_i, scale_i in zip(w.split(rows), q.split(rows), scale.split(rows), strict=True):
        q_i.copy_((w_i.float() / scale_i[:, None]).round_().clamp_(-127, 127))
    return q, scale


def dequantize_ref(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes rows: ``dtype(f32(q[r, c]) * scale[r])``.

    Args:
        q: int8 ``[R, C]``.
        scale: float32 ``[R]``.
        dtype: float16, bfloat16 or float32.

    Returns:
        ``dtype`` ``[R, C]``.

    Exactness: bitwise.
    """
    return (q.float() * scale[:, None]).to(dtype)


def colsum_ref(q: Tensor) -> Tensor:
    """``colsum[n] = sum_k q[n, k]`` in int32, which a product multiplies by the other operand's zero point.

    Args:
        q: int8 ``[N, K]``.

    Returns:
        int32 ``[N]``.

    Exactness: bitwise.
    """
    return q.sum(1, dtype=torch.int32)


def quantize_per_token_ref(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """Quantizes each row by its own largest magnitude.

    ``scale[m] = max_k |f32(x[m, k])| / 127`` (1 where that is 0),
    ``q = clamp(rne(f32(x) / scale[m]), -127, 127)``.

    A row that holds NaN or Inf gets the scale NaN and zeros, so that its output row is NaN: one bad
    token does not change the others.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; M may be 0.
        k_padded: columns of ``q``, at least K; those past K are 0.

    Returns:
        ``q`` int8 ``[M, k_padded]`` and ``scale`` float32 ``[M]``.

    Exactness: bitwise.
    """
    x = x.float()
    return quantize_by_absmax_ref(x, x.abs().amax(1), k_padded)


def quantize_by_absmax_ref(x: Tensor, absmax: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    """`quantize_per_token_ref` of float32 rows ``[M, K]`` with given largest magnitudes, float32 ``[M]``."""
    scale = _scale_from_absmax(absmax).masked_fill_(~absmax.isfinite(), math.nan)
    q = torch.zeros(x.shape[0], k_padded, dtype=torch.int8, device=x.device)
    q[:, : x.shape[1]] = (x / scale[:, None]).round_().clamp_(-127, 127).nan_to_num_(nan=0.0)
    return q, scale


def static_qparams(lo: float, hi: float) -> tuple[float, int]:
    """Asymmetric per-tensor parameters of a calibrated range.

    ``scale = (hi - lo) / 255`` (1 where that is 0) and
    ``zero_point = clamp(rne(-128 - lo / scale), -128, 127)``, in float32.

    Args:
        lo: finite, at most 0.
        hi: finite, at least 0.

    Returns:
        The scale, exactly representable in float32, and the zero point.

    Raises:
        ConfigError: the range does not hold zero, or is too wide for float32.

    Exactness: bitwise.
    """
    StaticRange(lo, hi)  # raises
    low, high = torch.tensor([lo, hi], dtype=torch.float32, device="cpu").unbind()
    scale = _divide(high - low, 255.0)
    if not scale.isfinite():
        raise ConfigError(f"static range [{lo}, {hi}] is too wide for float32")
    scale = scale.masked_fill(scale == 0, 1.0)
    zero_point = (-128.0 - low / scale).round().clamp(-128, 127)
    return float(scale), int(zero_point)


def quantize_per_tensor_ref(x: Tensor, scale: float, zero_point: int, k_padded: int) -> Tensor:
    """Quantizes all tokens with one calibrated scale and zero point.

    ``q = clamp(rne(f32(x) / f32(scale)) + zero_point, -128, 127)``; NaN becomes ``zero_point``, and ±Inf
    saturates.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; M may be 0.
        scale: positive.
        zero_point: in [-128, 127].
        k_padded: columns of ``q``, at least K; those past K are 0, where the weight is 0 as well.

    Returns:
        int8 ``[M, k_padded]``.

    Exactness: bitwise.
    """
    q = torch.zeros(x.shape[0], k_padded, dtype=torch.int8, device=x.device)
    q[:, : x.shape[1]] = _divide(x.float(), scale).round_().nan_to_num_(nan=0.0).add_(zero_point).clamp_(-128, 127)
    return q


def is_raw_output(out_dtype: torch.dtype, wrap: bool) -> bool:
    """Whether a GEMM returns its int32 accumulators, or with ``wrap`` their low eight bits, without an epilogue.

    Raises:
        ConfigError: ``wrap`` is set with another dtype than int8.
    """
    if wrap and out_dtype is not torch.int8:
        name = str(out_dtype).removeprefix("torch.")
        raise ConfigError(f"gemm_s8: wrap takes the low eight bits of a sum; out_dtype is {name}, allowed: int8")
    return wrap or out_dtype is torch.int32


def raise_absmax(absmax: Tensor | None, rows: Tensor) -> None:
    """Raises absmax in place: ``absmax[m] = max(absmax[m], max |f32(rows[m])|)``, where NaN counts as the largest.

    Args:
        absmax: float32 ``[M]``; None: nothing happens.
        rows: ``[M, ...]`` float16, bfloat16 or float32.
    """
    if absmax is not None and rows.numel():
        torch.maximum(absmax, rows.flatten(1).abs().amax(1).float(), out=absmax)


def check_zero_points(zero_point: int | Tensor) -> None:
    """Checks zero points on the CPU; on another device, where this would wait for the device, kernels saturate them.

    Raises:
        ConfigError: one is beyond int8, and the product with ``colsum`` might overflow.
    """
    if isinstance(zero_point, int):
        given = zero_point
    elif zero_point.device.type != "cpu" or zero_point.numel() == 0:
        return
    else:
        lowest, highest = (int(v) for v in torch.aminmax(zero_point))
        given = lowest if lowest < -128 else highest
    if not -128 <= given <= 127:
        raise ConfigError(f"gemm_s8: zero_point is {given}; allowed: -128 to 127")


def gemm_s8_ref(
    a: Tensor,
    b: Tensor,
    *,
    zero_point: int | Tensor | None = None,
    colsum: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | float | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    out_inv_scale: float = 1.0,
    out_zero_point: int = 0,
    wrap: bool = False,
) -> Tensor:
    """int8 GEMM with the epilogue of `qcut.emitters.core.epilogue`.

    Terms whose tensor is None are left out of::

        acc = sum_k a[m, k] * b[n, k]                # int32, exact
        v = f32(acc - zero_point[m] * colsum[n])     # the subtraction in int32
        v = v * row_scale[m] * col_scale[n]          # left to right
        v = act(v + bias[n])
        v = v + f32(residual[m, n])
        D = out_dtype(v)                             # int8: clamp(rne(v * out_inv_scale) + out_zero_point)

    An int32 result is ``acc`` itself, and an int8 result with ``wrap`` is the low eight bits of ``acc``; neither takes
    an epilogue.

    Args:
        a: int8 ``[M, K]``; M may be 0.
        b: int8 ``[N, K]``; K at most `K_MAX`, and `K_MAX_ZERO_POINT` with a zero point.
        zero_point: one int or int32 ``[M]``, in [-128, 127]; needs ``colsum``, and b in [-127, 127] where
            K is close to `K_MAX_ZERO_POINT`.
        colsum: int32 ``[N]``, `colsum_ref` of ``b``.
        row_scale: float32 ``[M]``.
        col_scale: float32 ``[N]``, or one float.
        bias: float32 ``[N]``.
        activation: see `ACTIVATIONS`.
        residual: ``out_dtype`` ``[M, N]``; not with int8.
        out_dtype: float16, bfloat16, float32, int8 or int32.
        out_inv_scale: inverse scale of an int8 result.
        out_zero_point: zero point of an int8 result. NaN becomes 0, as the hardware's conversion has it.
        wrap: an int8 result keeps the low eight bits of the accumulator.

    Returns:
        ``out_dtype`` ``[M, N]``, row-major.

    Raises:
        ConfigError: a zero point without colsum or out of range, a residual with int8, an unknown activation, ``wrap``
            with another dtype than int8, or anything fused with an output of raw accumulators.

    Exactness: bitwise for activations ``none`` and ``relu``; the others are float32 functions of
    the same argument.
    """
    if is_raw_output(out_dtype, wrap):
        fused = (zero_point, colsum, row_scale, col_scale, bias, residual)
        if any(x is not None for x in fused) or (activation, out_inv_scale, out_zero_point) != ("none", 1.0, 0):
            raise ConfigError("gemm_s8: an output of raw accumulators (int32, or wrap) can fuse nothing")
        return matmul_s8(a, b).to(out_dtype)
    acc = matmul_s8(a, b)
    if zero_point is not None:
        if colsum is None:
            raise ConfigError("gemm_s8: a zero point needs colsum")
        check_zero_points(zero_point)
        zp = zero_point[:, None] if isinstance(zero_point, Tensor) else zero_point
        acc -= zp * colsum
    return epilogue_ref(
        acc.float(),
        row_scale=row_scale,
        col_scale=col_scale,
        bias=bias,
        activation=activation,
        residual=residual,
        out_dtype=out_dtype,
        out_inv_scale=out_inv_scale,
        out_zero_point=out_zero_point,
    )


def epilogue_ref(
    v: Tensor,
    *,
    row_scale: Tensor | None,
    col_scale: Tensor | float | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None = None,
    out_dtype: torch.dtype,
    out_inv_scale: float = 1.0,
    out_zero_point: int = 0,
) -> Tensor:
    """What follows the sums of a product, as `gemm_s8_ref` states it.

    Args:
        v: float32 ``[M, N]``, the sums rounded once; overwritten.
        row_scale: float32 ``[M]`` or None.
        col_scale: float32 ``[N]``, one float, or None.
        bias: float32 ``[N]`` or None.
        activation: see `ACTIVATIONS`.
        residual: ``out_dtype`` ``[M, N]`` or None; not with int8.
        out_dtype: float16, bfloat16, float32 or int8.
        out_inv_scale: inverse scale of an int8 result.
        out_zero_point: zero point of an int8 result.

    Returns:
        ``out_dtype`` ``[M, N]``.

    Raises:
        ConfigError: a residual with int8, or an unknown activation.

    Exactness: as `gemm_s8_ref`.
    """
    if row_scale is not None:
        v *= row_scale[:, None]
    if col_scale is not None:
        v *= col_scale
    if bias is not None:
        v += bias
    v = apply_activation(v, activation)
    if residual is not None:
        if out_dtype is torch.int8:
            raise ConfigError("gemm_s8: a residual cannot be added to an int8 result")
        v += residual.float()
    if out_dtype is torch.int8:
        # The product of two float32 is exact in float64, so rounding to an integer is the only rounding.
        inv_scale = torch.tensor(out_inv_scale, dtype=torch.float32, device=v.device).double()
        v = v.double().mul_(inv_scale).round_().add_(out_zero_point).clamp_(-128, 127)
        return v.nan_to_num_(nan=0.0).to(torch.int8)
    return v.to(out_dtype)


def w8a8_linear_ref(x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``y = act(f32(acc) * s_x[m] * s_w[n] + b[n])`` on tokens quantized with a scale each.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        qweight: int8 ``[N, padded_k(K)]``, zero padded.
        weight_scale: float32 ``[N]``.
        bias: float32 ``[N]`` or None.
        activation: see `ACTIVATIONS`.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: as `gemm_s8_ref`. A row's result does not depend on the other rows.
    """
    q, x_scale = quantize_per_token_ref(x, qweight.shape[1])
    return gemm_s8_ref(
        q, qweight, row_scale=x_scale, col_scale=weight_scale, bias=bias, activation=activation, out_dtype=x.dtype
    )


def w8a8_static_linear_ref(
    x: Tensor,
    qweight: Tensor,
    col_scale: Tensor,
    colsum: Tensor,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
    activation: str,
) -> Tensor:
    """``y = act(f32(acc - z_x * colsum[n]) * col_scale[n] + b[n])`` with calibrated parameters.

    Args (the others and Returns as `w8a8_linear_ref`):
        col_scale: float32 ``[N]``, the rounded product ``x_scale * weight_scale[n]``.
        colsum: int32 ``[N]``, `colsum_ref` of ``qweight``.
        x_scale: scale of the activations.
        x_zero_point: zero point of the activations, in [-128, 127].

    Exactness: as `gemm_s8_ref`. A row's result does not depend on the other rows.
    """
    q = quantize_per_tensor_ref(x, x_scale, x_zero_point, qweight.shape[1])
    return gemm_s8_ref(
        q,
        qweight,
        zero_point=x_zero_point,
        colsum=colsum,
        col_scale=col_scale,
        bias=bias,
        activation=activation,
        out_dtype=x.dtype,
    )


def w8a16_linear_ref(x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``y = act((sum_k f32(x[m, k]) * qweight[n, k]) * s_w[n] + b[n])``: weights of a byte, float tokens.

    Args and Returns: as `w8a8_linear_ref`; qweight may be finite float8_e4m3fn, and weight_scale then float32
        ``[ceil(N / 16), ceil(K / 128)]``: sums of 128 columns are multiplied by their scale before they are added.

    Exactness: the sum is float32 and its order is the BLAS library's: an error of at most
    ``K * 2**-23 * sum_k |x * q|`` before the scale.
    """
    k, n = x.shape[1], len(qweight)
    if weight_scale.dim() == 2:
        v = x.new_zeros((len(x), n), dtype=torch.float32)
        for first, scale in zip(range(0, k, FP8_BLOCK), weight_scale.unbind(1), strict=True):
            part = slice(first, min(first + FP8_BLOCK, k))
            v += (x[:, part].float() @ qweight[:, part].float().t()) * scale.repeat_interleave(FP8_UNIT_ROWS)[:n]
        return epilogue_ref(v, row_scale=None, col_scale=None, bias=bias, activation=activation, out_dtype=x.dtype)
    v = x.float() @ qweight[:, :k].float().t()
    return epilogue_ref(v, row_scale=None, col_scale=weight_scale, bias=bias, activation=activation, out_dtype=x.dtype)


def apply_activation(v: Tensor, activation: str) -> Tensor:
    """The fused activations, in float32; NaN stays NaN.

    ``relu``: ``max(v, 0)``; ``gelu_erf``: ``v * (1 + erf(v / sqrt(2))) / 2``; ``gelu_tanh``:
    ``v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v**3))) / 2``; ``silu``: ``v / (1 + exp(-v))``.

    Raises:
        ConfigError: the activation does not exist.

    Exactness: ``none`` and ``relu`` bitwise; the others within 4 ulp of ``max(|v|, |act(v)|)``.
    """
    # Written as single operations: torch's fused functions differ in the last bit with an element's position. v is
    # halved before it is doubled, since 2 v may be beyond float32. In place, they could not be differentiated.
    match check_activation(activation):
        case "relu":
            return torch.relu(v)
        case "gelu_erf":
            return (torch.erf(v * math.sqrt(0.5)) + 1.0) * (v * 0.5)
        case "gelu_tanh":
            inner = (v * v * v * 0.044715 + v) * math.sqrt(2.0 / math.pi)
            return (inner.tanh() + 1.0) * (v * 0.5)
        case "silu":
            return v / (torch.exp(-v) + 1.0)
    return v


def sqnr_db(ref: Tensor, got: Tensor) -> float:
    """``10 log10(sum ref**2 / sum (ref - got)**2)`` in float64: signal over quantization noise.

    Returns:
        Decibels; ``inf`` where the two are equal.
    """
    ref, got = ref.double(), got.double()
    noise = (ref - got).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(max(ref.square().sum().item(), 1e-300) / noise)


def matmul_s8(a: Tensor, b: Tensor) -> Tensor:
    """Exact ``a @ b.T`` of int8 matrices ``[M, K]`` and ``[N, K]``, as int32 ``[M, N]``."""
    if a.shape[0] == 0:
        return torch.zeros(0, b.shape[0], dtype=torch.int32, device=a.device)
    if a.device.type != "cpu":
        return (a.double() @ b.double().t()).to(torch.int32)
    if a.shape[1] >= 16 and _int_mm_is_exact():
        # torch 2.13 reads the stride of a dimension of size 1, which contiguous() does not mend.
        a, b = (q.reshape(-1).view(q.shape) for q in (a, b))
        return torch._int_mm(a, b.t())
    # Sums of 1024 products are at most 2**24, so float32 holds every partial sum in any order.
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device="cpu")
    with torch.autocast("cpu", enabled=False):  # it would multiply in bfloat16
        for a_k, b_k in zip(a.split(1024, 1), b.split(1024, 1), strict=True):
            acc += (a_k.float() @ b_k.float().t()).to(torch.int32)
    return acc


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether this CPU's int8 product is fast and exact: without VNNI, pairs of products saturate."""
    if not getattr(torch.cpu, "_is_vnni_supported", lambda: False)():
        return False
    a = torch.full((33, 256), -128, dtype=torch.int8, device="cpu")
    b = torch.full((16, 256), -128, dtype=torch.int8, device="cpu")
    b[::2] = 127
    expected = (a.double() @ b.double().t()).to(torch.int32)
    return all(torch.equal(torch._int_mm(a[:m], b.t()), expected[:m]) for m in (1, 33))
