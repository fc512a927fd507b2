"""The operators of ``torch.ops.qcut``: schemas, argument checks, fakes, and the CPU implementations.

The CPU runs `qcut.numerics`, whose docstrings state the formulas; CUDA runs `qcut.cuda.int8`, imported at the first
CUDA call, and in front of its linear operators the C++ of `qcut.cuda.native`. Operators on codebook weights, and those
of a decoder before its first projection and between the others, are in `qcut.ops.codebook`, `qcut.ops.embed` and
`qcut.ops.decoder` and registered with these. Every operator is inference only, returns new tensors, row-major unless it
is told otherwise, and leaves its arguments alone unless its schema says so. The tensors of one call live on one device
and may have any strides.

Arguments are checked here for the CPU and for tracing; CUDA has cheaper checks of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcut.config import K_ALIGNMENT, K_MAX, K_MAX_ZERO_POINT, check_activation, padded_k
from qcut.errors import ConfigError, QuantizationError, ShapeError
from qcut.numerics import int8 as numerics
from qcut.ops import w8a8 as w8a8_ops  # noqa: F401  (these register their own)
from qcut.ops.registry import FLOAT_DTYPES, check_dtype, check_tensor, define

OUT_DTYPES = (*FLOAT_DTYPES, torch.int8, torch.int32)
OUT_LAYOUTS = ("row", "column")

_F32_TINY, _F32_MAX = 2.0**-149, (2 - 2.0**-23) * 2.0**127
_S8, _S32, _F32 = (torch.int8,), (torch.int32,), (torch.float32,)

# ── checks ───────────────────────────────────────────────────────────────────────────────────────


def _check_activations(op: str, x: Tensor) -> None:
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [..., K] with K >= 1")


def _check_matrix(op: str, name: str, q: Tensor, min_rows: int = 0) -> None:
    check_dtype(op, name, q.dtype, _S8)
    if q.dim() != 2 or q.shape[0] < min_rows or q.shape[1] < 1:
        allowed = f"[rows, columns] with rows >= {min_rows}, columns >= 1"
        raise ShapeError(f"qcut::{op}: {name} has shape {list(q.shape)}; allowed: {allowed}")


def _check_k(op: str, k: int, k_max: int) -> None:
    if k > k_max:
        raise QuantizationError(f"qcut::{op}: K is {k}; int32 sums are exact for K <= {k_max}")


def _check_zero_point(op: str, name: str, zero_point: int) -> None:
    if not -128 <= zero_point <= 127:
        raise ConfigError(f"qcut::{op}: {name} is {zero_point}; allowed: -128 to 127")


def _check_scale(op: str, name: str, scale: float) -> None:
    if not _F32_TINY <= scale <= _F32_MAX:
        raise ConfigError(f"qcut::{op}: {name} is {scale}; allowed: {_F32_TINY:.2g} to {_F32_MAX:.8g} (float32)")


def _check_quantize_per_token(x: Tensor, k_padded: int, op: str = "quantize_per_token") -> None:
    _check_activations(op, x)
    if k_padded < x.shape[-1]:
        raise ShapeError(f"qcut::{op}: k_padded is {k_padded}; allowed: at least K = {x.shape[-1]}")


def _check_quantize_per_tensor(x: Tensor, scale: float, zero_point: int, k_padded: int) -> None:
    op = "quantize_per_tensor"
    _check_quantize_per_token(x, k_padded, op)
    _check_scale(op, "scale", scale)
    _check_zero_point(op, "zero_point", zero_point)


def _check_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    _check_matrix("dequantize", "q", q)
    check_tensor("dequantize", "scale", scale, _F32, (q.shape[0],), q.device)
    check_dtype("dequantize", "dtype", dtype, FLOAT_DTYPES)


def _check_colsum(q: Tensor) -> None:
    _check_matrix("colsum", "q", q)
    _check_k("colsum", q.shape[1], K_MAX)


def _check_gemm_s8(
    a: Tensor,
    b: Tensor,
    *,
    zero_point: Tensor | None = None,
    colsum: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_inv_scale: float = 1.0,
    out_zero_point: int = 0,
    out_layout: str = "row",
    wrap: bool = False,
    tensor_cores: bool = True,
) -> None:
    op = "gemm_s8"
    _check_matrix(op, "a", a)
    _check_matrix(op, "b", b, min_rows=1)
    m, k = a.shape
    n = b.shape[0]
    check_tensor(op, "b", b, _S8, (n, k), a.device)
    if (zero_point is None) != (colsum is None):
        raise ConfigError(f"qcut::{op}: zero_point and colsum go together; give both or neither")
    _check_k(op, k, K_MAX if zero_point is None else K_MAX_ZERO_POINT)
    vectors = (
        ("zero_point", zero_point, _S32, m),
        ("colsum", colsum, _S32, n),
        ("row_scale", row_scale, _F32, m),
        ("col_scale", col_scale, _F32, n),
        ("bias", bias, _F32, n),
    )
    for name, vector, dtypes, extent in vectors:
        if vector is not None:
            check_tensor(op, name, vector, dtypes, (extent,), a.device)
    out_dtype = out_dtype or torch.float16
    check_dtype(op, "out_dtype", out_dtype, OUT_DTYPES)
    if out_layout not in OUT_LAYOUTS:
        raise ConfigError(f"qcut::{op}: out_layout is {out_layout!r}; allowed: {', '.join(OUT_LAYOUTS)}")
    if numerics.is_raw_output(out_dtype, wrap):
        given = [name for name, vector, *_ in vectors if vector is not None]
        given += ["residual"] if residual is not None else []
        given += ["activation"] if activation != "none" else []
        given += ["out_inv_scale"] if out_inv_scale != 1 else []
        given += ["out_zero_point"] if out_zero_point != 0 else []
        if given:
            what = "int32 sums" if out_dtype is torch.int32 else "low eight bits (wrap)"
            raise ConfigError(f"qcut::{op}: an output of {what} can fuse nothing; leave out {', '.join(given)}")
    if residual is not None:
        if out_dtype is torch.int8:
            raise ConfigError(f"qcut::{op}: a residual cannot be added to an int8 result; leave one out")
        check_tensor(op, "residual", residual, (out_dtype,), (m, n), a.device)
    check_activation(activation)
    _check_scale(op, "out_inv_scale", out_inv_scale)
    _check_zero_point(op, "out_zero_point", out_zero_point)


def _check_linear(
    op: str, x: Tensor, qweight: Tensor, scale: tuple[str, Tensor], bias: Tensor | None, activation: str
) -> None:
    _check_activations(op, x)
    _check_matrix(op, "qweight", qweight, min_rows=1)
    n, k = qweight.shape[0], x.shape[-1]
    if qweight.shape[1] != padded_k(k):
        found = f"x has K = {k}, qweight has shape {list(qweight.shape)}"
        raise ShapeError(f"qcut::{op}: {found}; allowed: [N, {padded_k(k)}], K rounded up to {K_ALIGNMENT}")
    check_tensor(op, "qweight", qweight, _S8, (n, padded_k(k)), x.device)
    check_tensor(op, scale[0], scale[1], _F32, (n,), x.device)
    if bias is not None:
        check_tensor(op, "bias", bias, _F32, (n,), x.device)
    check_activation(activation)


def _check_w8a8_linear(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    op: str = "w8a8_linear",
) -> None:
    _check_linear(op, x, qweight, ("weight_scale", weight_scale), bias, activation)
    _check_k(op, x.shape[-1], K_MAX)


def _check_w8a8_static_linear(
    x: Tensor,
    qweight: Tensor,
    col_scale: Tensor,
    colsum: Tensor,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
    activation: str,
) -> None:
    op = "w8a8_static_linear"
    _check_linear(op, x, qweight, ("col_scale", col_scale), bias, activation)
    check_tensor(op, "colsum", colsum, _S32, (qweight.shape[0],), x.device)
    _check_k(op, x.shape[-1], K_MAX_ZERO_POINT)
    _check_scale(op, "x_scale", x_scale)
    _check_zero_point(op, "x_zero_point", x_zero_point)


def _check_w8a16_linear(x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str) -> None:
    _check_linear("w8a16_linear", x, qweight, ("weight_scale", weight_scale), bias, activation)


# ── fakes and CPU implementations ────────────────────────────────────────────────────────────────


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _quantize_per_token_fake(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    m = math.prod(x.shape[:-1])
    return x.new_empty((m, k_padded), dtype=torch.int8), x.new_empty((m,), dtype=torch.float32)


def _quantize_per_token_cpu(x: Tensor, k_padded: int) -> tuple[Tensor, Tensor]:
    return numerics.quantize_per_token_ref(_flat(x), k_padded)


def _quantize_per_tensor_fake(x: Tensor, scale: float, zero_point: int, k_padded: int) -> Tensor:
    return x.new_empty((math.prod(x.shape[:-1]), k_padded), dtype=torch.int8)


def _quantize_per_tensor_cpu(x: Tensor, scale: float, zero_point: int, k_padded: int) -> Tensor:
    return numerics.quantize_per_tensor_ref(_flat(x), scale, zero_point, k_padded)


def _dequantize_fake(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


def _dequantize_cpu(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return numerics.dequantize_ref(q.contiguous(), scale, dtype)


def _colsum_fake(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0],), dtype=torch.int32)


def _gemm_s8_out(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out_layout: str) -> Tensor:
    """Memory for the result: ``[M, N]``, row-major or column-major."""
    m, n, dtype = a.shape[0], b.shape[0], out_dtype or torch.float16
    return a.new_empty((m, n), dtype=dtype) if out_layout == "row" else a.new_empty((n, m), dtype=dtype).t()


def _gemm_s8_fake(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out_layout: str = "row", **_: Any
) -> Tensor:
    return _gemm_s8_out(a, b, out_dtype, out_layout)


def _gemm_s8_cpu(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out_layout: str = "row",
    tensor_cores: bool = True,
    **epilogue: Any,
) -> Tensor:
    result = numerics.gemm_s8_ref(a, b, out_dtype=out_dtype or torch.float16, **epilogue)
    return result if out_layout == "row" else _gemm_s8_out(a, b, out_dtype, out_layout).copy_(result)


def _linear_fake(x: Tensor, qweight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


def _linear_cpu(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, qweight: Tensor, *rest: Any) -> Tensor:
        return reference(_flat(x), qweight, *rest).view(*x.shape[:-1], qweight.shape[0])

    return call


# ── registration ─────────────────────────────────────────────────────────────────────────────────

define(
    "quantize_per_token(Tensor x, int k_padded) -> (Tensor, Tensor)",
    _check_quantize_per_token,
    _quantize_per_token_fake,
    _quantize_per_token_cpu,
)
define(
    "quantize_per_tensor(Tensor x, float scale, int zero_point, int k_padded) -> Tensor",
    _check_quantize_per_tensor,
    _quantize_per_tensor_fake,
    _quantize_per_tensor_cpu,
)
define(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    _check_dequantize,
    _dequantize_fake,
    _dequantize_cpu,
)
define("colsum(Tensor q) -> Tensor", _check_colsum, _colsum_fake, numerics.colsum_ref)
define(
    "gemm_s8(Tensor a, Tensor b, *, Tensor? zero_point=None, Tensor? colsum=None, Tensor? row_scale=None, "
    "Tensor? col_scale=None, Tensor? bias=None, str activation='none', Tensor? residual=None, "
    "ScalarType? out_dtype=None, float out_inv_scale=1.0, int out_zero_point=0, str out_layout='row', bool wrap=False, "
    "bool tensor_cores=True) -> Tensor",
    _check_gemm_s8,
    _gemm_s8_fake,
    _gemm_s8_cpu,
)
define(
    "w8a8_linear(Tensor x, Tensor qweight, Tensor weight_scale, Tensor? bias, str activation) -> Tensor",
    _check_w8a8_linear,
    _linear_fake,
    _linear_cpu(numerics.w8a8_linear_ref),
    native=True,
)
define(
    "w8a8_static_linear(Tensor x, Tensor qweight, Tensor col_scale, Tensor colsum, Tensor? bias, float x_scale, "
    "int x_zero_point, str activation) -> Tensor",
    _check_w8a8_static_linear,
    _linear_fake,
    _linear_cpu(numerics.w8a8_static_linear_ref),
    native=True,
)
define(
    "w8a16_linear(Tensor x, Tensor qweight, Tensor weight_scale, Tensor? bias, str activation) -> Tensor",
    _check_w8a16_linear,
    _linear_fake,
    _linear_cpu(numerics.w8a16_linear_ref),
    native=True,
)
