"""Every refusal of torch.ops.qcut, on the CPU and while tracing."""

from __future__ import annotations

import pytest
import torch

import qcut.ops
from qcut import errors
from qcut.schemes import K_MAX, K_MAX_ZERO_POINT
from tests.support.oracles import NAN, layer, s8, tokens

qcut = torch.ops.qcut
S8, S32, F32 = torch.int8, torch.int32, torch.float32


def w8a8(device: str, **changed):
    w = {key: value.to(device) for key, value in layer().items()}
    call = {"x": tokens(3, 21).to(device), **w, "activation": "none"} | changed
    return qcut.w8a8_linear(call["x"], call["qweight"], call["scale"], call["bias"], call["activation"])


def static(device: str, **changed):
    w = {key: value.to(device) for key, value in layer().items()}
    call = {"x": tokens(3, 21).to(device), **w, "x_scale": 0.1, "zp": 0} | changed
    return qcut.w8a8_static_linear(
        call["x"], call["qweight"], call["scale"], call["colsum"], call["bias"], call["x_scale"], call["zp"], "none"
    )


def gemm(device: str, **changed):
    call = {"a": s8(3, 16, device=device), "b": s8(5, 16, device=device)} | changed
    return qcut.gemm_s8(call.pop("a"), call.pop("b"), **call)


def wide(device: str, k: int) -> torch.Tensor:
    return torch.empty(1, k, dtype=S8, device=device)


REFUSALS = [
    # The linear operators share their checks.
    (
        lambda d: w8a8(d, x=tokens(3, 21).double().to(d)),
        errors.DtypeError,
        r"w8a8_linear: x is float64; allowed: float16",
    ),
    (lambda d: w8a8(d, x=torch.tensor(1.0, device=d)), errors.ShapeError, r"x has shape \[\]; allowed: \[..., K\]"),
    (
        lambda d: w8a8(d, x=tokens(3, 0).to(d)),
        errors.ShapeError,
        r"x has shape \[3, 0\]; allowed: \[..., K\] with K >= 1",
    ),
    (
        lambda d: w8a8(d, x=tokens(3, 9).to(d)),
        errors.ShapeError,
        r"x has K = 9, qweight has shape \[7, 32\]; allowed: \[N, 16\]",
    ),
    (lambda d: w8a8(d, qweight=torch.zeros(7, 32, device=d)), errors.DtypeError, r"qweight is float32; allowed: int8"),
    (lambda d: w8a8(d, qweight=s8(0, 32, device=d)), errors.ShapeError, r"qweight has shape \[0, 32\]; .* rows >= 1"),
    (lambda d: w8a8(d, qweight=s8(32, device=d)), errors.ShapeError, r"qweight has shape \[32\]"),
    (
        lambda d: w8a8(d, scale=torch.rand(6, device=d)),
        errors.ShapeError,
        r"weight_scale has shape \[6\]; allowed: \[7\]",
    ),
    (
        lambda d: w8a8(d, scale=torch.rand(7, device=d).half()),
        errors.DtypeError,
        r"weight_scale is float16; allowed: float32",
    ),
    (lambda d: w8a8(d, bias=torch.rand(1, 7, device=d)), errors.ShapeError, r"bias has shape \[1, 7\]; allowed: \[7\]"),
    (lambda d: w8a8(d, bias=torch.rand(7, device=d).half()), errors.DtypeError, r"bias is float16; allowed: float32"),
    (
        lambda d: w8a8(d, activation="gelu"),
        errors.ConfigError,
        r"activation 'gelu' does not exist; use one of none, relu",
    ),
    (
        lambda d: w8a8(d, x=torch.empty(1, K_MAX + 1, device=d), qweight=wide(d, K_MAX + 1).expand(7, -1)),
        errors.QuantizationError,
        rf"w8a8_linear: K is {K_MAX + 1}; int32 sums are exact for K <= {K_MAX}",
    ),
    (
        lambda d: static(d, x=torch.empty(1, K_MAX_ZERO_POINT + 1, device=d), qweight=wide(d, 66_320).expand(7, -1)),
        errors.QuantizationError,
        rf"w8a8_static_linear: K is {K_MAX_ZERO_POINT + 1}; int32 sums are exact for K <= {K_MAX_ZERO_POINT}",
    ),
    (
        lambda d: static(d, colsum=torch.zeros(6, dtype=S32, device=d)),
        errors.ShapeError,
        r"colsum has shape \[6\]; allowed: \[7\]",
    ),
    (lambda d: static(d, colsum=torch.zeros(7, device=d)), errors.DtypeError, r"colsum is float32; allowed: int32"),
    (lambda d: static(d, x_scale=0.0), errors.ConfigError, r"x_scale is 0.0; allowed: 1.4e-45 to 3.4028235e\+38"),
    (lambda d: static(d, x_scale=1e-60), errors.ConfigError, r"x_scale is 1e-60; allowed"),
    (lambda d: static(d, x_scale=NAN), errors.ConfigError, r"x_scale is nan; allowed"),
    (lambda d: static(d, zp=128), errors.ConfigError, r"x_zero_point is 128; allowed: -128 to 127"),
    (
        lambda d: qcut.w8a16_linear(tokens(1, 9).to(d), s8(7, 32, device=d), torch.rand(7, device=d), None, "none"),
        errors.ShapeError,
        r"w8a16_linear: x has K = 9",
    ),
    # Quantizers.
    (lambda d: qcut.quantize_per_token(s8(3, 4, device=d), 16), errors.DtypeError, r"quantize_per_token: x is int8"),
    (
        lambda d: qcut.quantize_per_token(tokens(3, 17).to(d), 16),
        errors.ShapeError,
        r"k_padded is 16; allowed: at least K = 17",
    ),
    (
        lambda d: qcut.quantize_per_tensor(tokens(3, 17).to(d), 1.0, 0, 16),
        errors.ShapeError,
        r"per_tensor: k_padded is 16",
    ),
    (
        lambda d: qcut.quantize_per_tensor(tokens(3, 4).to(d), -1.0, 0, 16),
        errors.ConfigError,
        r"scale is -1.0; allowed",
    ),
    (
        lambda d: qcut.quantize_per_tensor(tokens(3, 4).to(d), 1.0, -129, 16),
        errors.ConfigError,
        r"zero_point is -129; allowed",
    ),
    (
        lambda d: qcut.dequantize(s8(3, device=d), torch.rand(3, device=d), F32),
        errors.ShapeError,
        r"dequantize: q has shape \[3\]",
    ),
    (
        lambda d: qcut.dequantize(s8(3, 4, device=d), torch.rand(4, device=d), F32),
        errors.ShapeError,
        r"scale has shape \[4\]",
    ),
    (
        lambda d: qcut.dequantize(s8(3, 4, device=d), torch.rand(3, device=d), S8),
        errors.DtypeError,
        r"dtype is int8; allowed: float16",
    ),
    (lambda d: qcut.colsum(torch.zeros(3, 4, device=d)), errors.DtypeError, r"colsum: q is float32; allowed: int8"),
    (lambda d: qcut.colsum(s8(3, 0, device=d)), errors.ShapeError, r"colsum: q has shape \[3, 0\]; .* columns >= 1"),
    (lambda d: qcut.colsum(wide(d, K_MAX + 1)), errors.QuantizationError, r"colsum: K is 131072"),
    # The GEMM.
    (lambda d: gemm(d, a=s8(3, 4, 16, device=d)), errors.ShapeError, r"gemm_s8: a has shape \[3, 4, 16\]"),
    (lambda d: gemm(d, b=s8(5, 32, device=d)), errors.ShapeError, r"b has shape \[5, 32\]; allowed: \[5, 16\]"),
    (lambda d: gemm(d, b=s8(0, 16, device=d)), errors.ShapeError, r"b has shape \[0, 16\]; .* rows >= 1"),
    (
        lambda d: gemm(d, a=wide(d, K_MAX + 1), b=wide(d, K_MAX + 1)),
        errors.QuantizationError,
        r"K is 131072; .* K <= 131071",
    ),
    (
        lambda d: gemm(
            d,
            a=wide(d, 66_312),
            b=wide(d, 66_312),
            zero_point=torch.zeros(1, dtype=S32, device=d),
            colsum=torch.zeros(1, dtype=S32, device=d),
        ),
        errors.QuantizationError,
        r"K is 66312; .* K <= 66311",
    ),
    (
        lambda d: gemm(d, colsum=torch.zeros(5, dtype=S32, device=d)),
        errors.ConfigError,
        r"zero_point and colsum go together",
    ),
    (
        lambda d: gemm(d, zero_point=torch.zeros(3, dtype=S32, device=d)),
        errors.ConfigError,
        r"zero_point and colsum go together",
    ),
    (
        lambda d: gemm(d, row_scale=torch.rand(5, device=d)),
        errors.ShapeError,
        r"row_scale has shape \[5\]; allowed: \[3\]",
    ),
    (
        lambda d: gemm(d, col_scale=torch.rand(1, device=d)),
        errors.ShapeError,
        r"col_scale has shape \[1\]; allowed: \[5\]",
    ),
    (lambda d: gemm(d, bias=torch.rand(3, device=d)), errors.ShapeError, r"bias has shape \[3\]; allowed: \[5\]"),
    (
        lambda d: gemm(d, out_dtype=torch.float64),
        errors.DtypeError,
        r"out_dtype is float64; allowed: float16, bfloat16, float32, int8",
    ),
    (
        lambda d: gemm(d, residual=torch.rand(3, 5, device=d)),
        errors.DtypeError,
        r"residual is float32; allowed: float16",
    ),
    (
        lambda d: gemm(d, residual=torch.rand(5, 3, device=d).half()),
        errors.ShapeError,
        r"residual has shape \[5, 3\]; allowed: \[3, 5\]",
    ),
    (
        lambda d: gemm(d, residual=s8(3, 5, device=d), out_dtype=S8),
        errors.ConfigError,
        r"residual cannot be added to an int8",
    ),
    (lambda d: gemm(d, activation="tanh"), errors.ConfigError, r"activation 'tanh' does not exist"),
    (lambda d: gemm(d, out_inv_scale=float("inf")), errors.ConfigError, r"out_inv_scale is inf"),
    (
        lambda d: gemm(d, out_layout="col"),
        errors.ConfigError,
        r"gemm_s8: out_layout is 'col'; allowed: row, column",
    ),
    (
        lambda d: gemm(d, wrap=True, out_dtype=torch.int32),
        errors.ConfigError,
        r"wrap takes the low eight bits of a sum; out_dtype is int32, allowed: int8",
    ),
    (
        lambda d: gemm(d, out_dtype=torch.int32, bias=torch.rand(5, device=d), activation="relu"),
        errors.ConfigError,
        r"an output of int32 sums can fuse nothing; leave out bias, activation",
    ),
    (
        lambda d: gemm(d, out_dtype=S8, wrap=True, residual=s8(3, 5, device=d), out_inv_scale=2.0, out_zero_point=1),
        errors.ConfigError,
        r"low eight bits \(wrap\) can fuse nothing; leave out residual, out_inv_scale, out_zero_point",
    ),
    (lambda d: gemm(d, out_zero_point=-129), errors.ConfigError, r"out_zero_point is -129; allowed: -128 to 127"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[m[:40] for *_, m in REFUSALS])
def test_refusals_name_what_was_found_and_what_is_allowed(call, error, message, device):
    with pytest.raises(error, match=message) as info:
        call(device)
    assert isinstance(info.value, errors.QcutError)


@pytest.mark.parametrize("zero_point", [-129, 128, 2**31 - 1])
def test_a_zero_point_beyond_int8_is_refused(zero_point):
    points = torch.tensor([0, zero_point, 3], dtype=S32)
    with pytest.raises(errors.ConfigError, match=f"zero_point is {zero_point}; allowed: -128 to 127"):
        gemm("cpu", zero_point=points, colsum=torch.zeros(5, dtype=S32))


def test_mixed_devices_are_refused():
    w = layer()
    for name in ("qweight", "scale", "bias"):
        with pytest.raises(errors.DeviceError, match="the first argument is on cpu"):
            w8a8("cpu", **{name: w[name].to("meta")})
    with pytest.raises(errors.DeviceError, match="row_scale is on meta; the first argument is on cpu"):
        gemm("cpu", row_scale=torch.rand(3, device="meta"))


def test_refused_while_compiling():
    w = layer()
    compiled = torch.compile(lambda x: qcut.w8a8_linear(x, w["qweight"], w["scale"], None, "none"), backend="eager")
    with pytest.raises(Exception, match="x has K = 9, qweight has shape"):
        compiled(tokens(3, 9))
