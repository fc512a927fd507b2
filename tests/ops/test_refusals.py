"""Refusals of the operators of int8, on the CPU and while tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import ConfigError, DeviceError, DtypeError, QcutError, QuantizationError, ShapeError
from qcut.schemes import K_MAX, K_MAX_ZERO_POINT, padded_k
from tests.support.oracles import NAN, layer, layer_fp8, s8, tokens

OPS = torch.ops.qcut
S8, S32 = torch.int8, torch.int32


def called(op: str, device: str = "cpu", **changes: Any) -> Any:
    """The operator of valid arguments on a device, except for changes, which stay where they are."""
    w, x = layer(), tokens(3, 21)
    linear = {"qweight": w["qweight"], "weight_scale": w["scale"], "bias": w["bias"], "activation": "none"}
    static = {"qweight": w["qweight"], "col_scale": w["scale"], "colsum": w["colsum"], "bias": w["bias"]}
    f8 = layer_fp8()
    fp8_static = {"qweight": f8["qweight"], "col_scale": f8["scale"], "bias": f8["bias"]}
    int8 = {"q": s8(3, 32), "q_scale": torch.rand(3), "dtype": torch.float32, "absmax": torch.zeros(3)}
    given: dict[str, Any] = {
        "w8a8_linear": {"x": x, **linear},
        "w8a8_static_linear": {"x": x, **static, "x_scale": 0.1, "x_zero_point": 0, "activation": "none"},
        "w8a16_linear": {"x": x, **linear},
        "fp8_dynamic_linear": {"x": x, **linear, "qweight": f8["qweight"]},
        "fp8_static_linear": {"x": x, **fp8_static, "x_scale": 0.1, "activation": "none"},
        "int8_linear": {**int8, **linear},
        "noted_linear": {"x": x, "x_absmax": x.abs().amax(1), **linear},
        "quantize_per_token": {"x": tokens(3, 17), "k_padded": 32},
        "quantize_per_tensor": {"x": tokens(3, 4), "scale": 1.0, "zero_point": 0, "k_padded": 16},
        "dequantize": {"q": s8(3, 4), "scale": torch.rand(3), "dtype": torch.float32},
        "colsum": {"q": s8(3, 4)},
        "gemm_s8": {"a": s8(3, 16), "b": s8(5, 16)},
    }[op]
    return getattr(OPS, op)(**{**on(device, given), **changes})


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Strided tensors keep their strides on the meta device."""
    if device == "cpu":
        return arguments
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) if isinstance(v, Tensor) else v
        for name, v in arguments.items()
    }


def wide(k: int, rows: int = 1) -> Tensor:
    return torch.empty(1, k, dtype=S8).expand(rows, -1)


def zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=S32)


OF_LINEARS = (
    ({"qweight": torch.zeros(7, 32)}, DtypeError, "qweight is float32; allowed: int8"),
    ({"weight_scale": torch.ones(6)}, ShapeError, r"weight_scale has shape \[6\]; allowed: \[7\]"),
    ({"weight_scale": torch.ones(7).half()}, DtypeError, "weight_scale is float16; allowed: float32"),
    ({"bias": torch.ones(1, 7)}, ShapeError, r"bias has shape \[1, 7\]; allowed: \[7\]"),
    ({"bias": torch.ones(7).half()}, DtypeError, "bias is float16; allowed: float32"),
    ({"activation": "gelu"}, ConfigError, "activation 'gelu' does not exist; use one of none, relu"),
)
K_REFUSED = padded_k(K_MAX + 1)
REFUSALS: dict[str, tuple[tuple[dict[str, Any], type[QcutError], str], ...]] = {
    "w8a8_linear": (
        *OF_LINEARS,
        ({"x": tokens(3, 21).double()}, DtypeError, "x is float64; allowed: float16"),
        ({"x": torch.tensor(1.0)}, ShapeError, r"x has shape \[\]; allowed: \[..., K\]"),
        ({"x": tokens(3, 0)}, ShapeError, r"x has shape \[3, 0\]; allowed: \[..., K\] with K >= 1"),
        ({"x": tokens(3, 9)}, ShapeError, r"x has K = 9, qweight has shape \[7, 32\]; allowed: \[N, 16\]"),
        ({"qweight": s8(0, 32)}, ShapeError, r"qweight has shape \[0, 32\]; .* rows >= 1"),
        ({"qweight": s8(32)}, ShapeError, r"qweight has shape \[32\]"),
        (
            {"x": torch.empty(1, K_MAX + 1), "qweight": wide(K_MAX + 1, 7)},
            QuantizationError,
            rf"K is {K_MAX + 1}; int32 sums are exact for K <= {K_MAX}",
        ),
    ),
    "w8a8_static_linear": (
        (
            {"x": torch.empty(1, K_MAX_ZERO_POINT + 1), "qweight": wide(66_320, 7)},
            QuantizationError,
            rf"K is {K_MAX_ZERO_POINT + 1}; int32 sums are exact for K <= {K_MAX_ZERO_POINT}",
        ),
        ({"colsum": zeros(6)}, ShapeError, r"colsum has shape \[6\]; allowed: \[7\]"),
        ({"colsum": torch.zeros(7)}, DtypeError, "colsum is float32; allowed: int32"),
        ({"x_scale": 0.0}, ConfigError, r"x_scale is 0.0; allowed: 1.4e-45 to 3.4028235e\+38"),
        ({"x_scale": 1e-60}, ConfigError, "x_scale is 1e-60; allowed"),
        ({"x_scale": NAN}, ConfigError, "x_scale is nan; allowed"),
        ({"x_zero_point": 128}, ConfigError, "x_zero_point is 128; allowed: -128 to 127"),
    ),
    "w8a16_linear": (({"x": tokens(1, 9)}, ShapeError, "x has K = 9"),),
    "fp8_dynamic_linear": (
        ({"x": tokens(1, 9)}, ShapeError, "x has K = 9"),
        ({"qweight": s8(7, 32)}, DtypeError, "qweight is int8; allowed: float8_e4m3fn"),
        ({"weight_scale": torch.ones(1, 1)}, ShapeError, r"weight_scale has shape \[1, 1\]; allowed: \[7\]"),
    ),
    "fp8_static_linear": (
        ({"col_scale": torch.ones(6)}, ShapeError, r"col_scale has shape \[6\]; allowed: \[7\]"),
        ({"x_scale": 0.0}, ConfigError, r"x_scale is 0.0; allowed: 1.4e-45 to 3.4028235e\+38"),
    ),
    "int8_linear": (
        *OF_LINEARS,
        ({"q": torch.zeros(3, 32)}, DtypeError, "q is float32; allowed: int8"),
        ({"q": s8(3, 21)}, ShapeError, r"q has shape \[3, 21\]; allowed: \[rows, K\], K a mult"),
        ({"q": s8(3, 48)}, ShapeError, r"q has shape \[3, 48\]; allowed: \[3, 32\]"),
        ({"q": s8(32)}, ShapeError, r"q has shape \[32\]; allowed: \[rows, K\]"),
        ({"q_scale": torch.ones(2)}, ShapeError, r"q_scale has shape \[2\]; allowed: \[3\]"),
        ({"dtype": torch.float64}, DtypeError, "dtype is float64; allowed: float16, bfloat16, float32"),
        ({"absmax": torch.zeros(3).half()}, DtypeError, "absmax is float16; allowed: float32"),
        ({"absmax": torch.zeros(4)}, ShapeError, r"absmax has shape \[4\]; allowed: \[3\]"),
        ({"absmax": torch.zeros(6)[::2]}, ShapeError, r"absmax has strides \[2\]; allowed: contiguous"),
        ({"q": wide(K_REFUSED, 3), "qweight": wide(K_REFUSED, 7)}, QcutError, f".*{K_MAX}"),
    ),
    "noted_linear": (
        *OF_LINEARS,
        ({"x": torch.zeros(3)}, ShapeError, r"x has shape \[3\]; allowed: \[M, K\]"),
        ({"x": torch.zeros(3, 21).double()}, DtypeError, "x is float64; allowed: float16, bfloat16, float32"),
        ({"x": torch.zeros(3, 40)}, ShapeError, r"x has K = 40, .* shape \[7, 32\]; .*\[N, 48\]"),
        ({"x_absmax": torch.zeros(4)}, ShapeError, r"x_absmax has shape \[4\]; allowed: \[3\]"),
        ({"x": torch.empty(3, K_REFUSED), "qweight": wide(K_REFUSED, 7)}, QcutError, f".*{K_MAX}"),
    ),
    "quantize_per_token": (
        ({"x": s8(3, 4)}, DtypeError, "x is int8"),
        ({"k_padded": 16}, ShapeError, "k_padded is 16; allowed: at least K = 17"),
    ),
    "quantize_per_tensor": (
        ({"x": tokens(3, 17)}, ShapeError, "k_padded is 16"),
        ({"scale": -1.0}, ConfigError, "scale is -1.0; allowed"),
        ({"zero_point": -129}, ConfigError, "zero_point is -129; allowed"),
    ),
    "dequantize": (
        ({"q": s8(3)}, ShapeError, r"q has shape \[3\]"),
        ({"scale": torch.rand(4)}, ShapeError, r"scale has shape \[4\]"),
        ({"dtype": S8}, DtypeError, "dtype is int8; allowed: float16"),
    ),
    "colsum": (
        ({"q": torch.zeros(3, 4)}, DtypeError, "q is float32; allowed: int8"),
        ({"q": s8(3, 0)}, ShapeError, r"q has shape \[3, 0\]; .* columns >= 1"),
        ({"q": wide(K_MAX + 1)}, QuantizationError, "K is 131072"),
    ),
    "gemm_s8": (
        ({"a": s8(3, 4, 16)}, ShapeError, r"a has shape \[3, 4, 16\]"),
        ({"b": s8(5, 32)}, ShapeError, r"b has shape \[5, 32\]; allowed: \[5, 16\]"),
        ({"b": s8(0, 16)}, ShapeError, r"b has shape \[0, 16\]; .* rows >= 1"),
        ({"a": wide(K_MAX + 1), "b": wide(K_MAX + 1)}, QuantizationError, "K is 131072; .* K <= 131071"),
        (
            {"a": wide(66_312), "b": wide(66_312), "zero_point": zeros(1), "colsum": zeros(1)},
            QuantizationError,
            "K is 66312; .* K <= 66311",
        ),
        ({"colsum": zeros(5)}, ConfigError, "zero_point and colsum go together"),
        ({"zero_point": zeros(3)}, ConfigError, "zero_point and colsum go together"),
        ({"row_scale": torch.rand(5)}, ShapeError, r"row_scale has shape \[5\]; allowed: \[3\]"),
        ({"col_scale": torch.rand(1)}, ShapeError, r"col_scale has shape \[1\]; allowed: \[5\]"),
        ({"bias": torch.rand(3)}, ShapeError, r"bias has shape \[3\]; allowed: \[5\]"),
        ({"out_dtype": torch.float64}, DtypeError, "out_dtype is float64; allowed: float16, bfloat16, float32, int8"),
        ({"residual": torch.rand(3, 5)}, DtypeError, "residual is float32; allowed: float16"),
        ({"residual": torch.rand(5, 3).half()}, ShapeError, r"residual has shape \[5, 3\]; allowed: \[3, 5\]"),
        ({"residual": s8(3, 5), "out_dtype": S8}, ConfigError, "a residual cannot be added to an int8"),
        ({"activation": "tanh"}, ConfigError, "activation 'tanh' does not exist"),
        ({"out_inv_scale": float("inf")}, ConfigError, "out_inv_scale is inf"),
        ({"out_layout": "col"}, ConfigError, "out_layout is 'col'; allowed: row, column"),
        (
            {"wrap": True, "out_dtype": S32},
            ConfigError,
            "wrap takes the low eight bits of a sum; out_dtype is int32, allowed: int8",
        ),
        (
            {"out_dtype": S32, "bias": torch.rand(5), "activation": "relu"},
            ConfigError,
            "an output of int32 sums can fuse nothing; leave out bias, activation",
        ),
        (
            {"out_dtype": S8, "wrap": True, "residual": s8(3, 5), "out_inv_scale": 2.0, "out_zero_point": 1},
            ConfigError,
            r".*low eight bits \(wrap\) can fuse nothing; leave out residual, out_inv_scale, out_zero_point",
        ),
        ({"out_zero_point": -129}, ConfigError, "out_zero_point is -129; allowed: -128 to 127"),
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op", REFUSALS)
def test_refusals_name_operator_and_allowed_values(op: str, device: str) -> None:
    for changes, error, message in REFUSALS[op]:
        # The error of an activation names no operator, and some of gemm_s8 leave out the namespace.
        where = "" if message.startswith("activation") else "gemm_s8: " if op == "gemm_s8" else f"^qcut::{op}: "
        with pytest.raises(error, match=where + message):
            called(op, device, **on(device, changes))


@pytest.mark.parametrize("zero_point", [-129, 128, 2**31 - 1])
def test_a_zero_point_beyond_int8_is_refused(zero_point: int) -> None:
    points = torch.tensor([0, zero_point, 3], dtype=S32)
    with pytest.raises(ConfigError, match=f"zero_point is {zero_point}; allowed: -128 to 127"):
        called("gemm_s8", zero_point=points, colsum=zeros(5))


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        ("w8a8_linear", {"qweight": s8(7, 32), "weight_scale": torch.ones(7), "bias": torch.ones(7)}),
        ("gemm_s8", {"row_scale": torch.ones(3)}),
        ("int8_linear", {"q_scale": torch.ones(3), "weight_scale": torch.ones(7), "bias": torch.ones(7)}),
        ("int8_linear", {"absmax": torch.ones(3)}),
        ("noted_linear", {"x_absmax": torch.ones(3), "qweight": s8(7, 32)}),
        ("noted_linear", {"weight_scale": torch.ones(7), "bias": torch.ones(7)}),
    ],
)
def test_mixed_devices_are_refused(op: str, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        with pytest.raises(DeviceError, match=f"{op}: {name} is on meta; the first argument is on cpu"):
            called(op, **{name: tensor.to("meta")})


def test_refused_while_compiling() -> None:
    w = layer()
    compiled = torch.compile(lambda x: OPS.w8a8_linear(x, w["qweight"], w["scale"], None, "none"), backend="eager")
    with pytest.raises(Exception, match="x has K = 9, qweight has shape"):
        compiled(tokens(3, 9))
