"""Norms that add the residual first: the modules' arithmetic, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.numerics.codebook.tokens import operands
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("residual", [False, True])
def test_norms_are_the_modules(dtype: torch.dtype, residual: bool) -> None:
    x, other = torch.randn(2, 5, 48).to(dtype)
    weight, bias = torch.randn(2, 48).to(dtype)
    s = x + other if residual else x
    rms = LlamaRMSNorm(48, 1e-5)
    rms.weight.data = weight
    for layer, b, want in (
        (False, None, rms(s)),
        (True, bias, F.layer_norm(s, (48,), weight, bias, 1e-5)),
        (True, None, F.layer_norm(s, (48,), weight, None, 1e-5)),
    ):
        total, y = OPS.add_norm(x, other if residual else None, weight, b, layer, 1e-5)
        assert torch.equal(y, want)
        assert torch.equal(total, s) if residual else total.shape == (0,)


@pytest.mark.parametrize("layer", [False, True])
def test_int8_norms_are_the_norms_quantized(layer: bool) -> None:
    x, residual = torch.randn(2, 5, 40).half()
    weight, bias = torch.randn(2, 40).half()
    given = (x, residual, weight, bias if layer else None, layer, 1e-5)
    total, y = OPS.add_norm(*given)
    plain = torch.zeros(5, 40).half()
    for beside in (None, plain):
        got = OPS.add_norm_int8(*given, 48, beside)
        assert all(map(torch.equal, got, (total, *OPS.quantize_per_token(y, 48))))
    assert torch.equal(plain, y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("to", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("residual", [False, True])
def test_rotated_norms_are_the_norms_rotated(to: torch.dtype, residual: bool) -> None:
    x, other = torch.randn(2, 9, 192).bfloat16()
    weight, bias = torch.randn(2, 192).bfloat16()
    given = (x, other if residual else None, weight, bias, True, 1e-5)
    signs = operands("hadamard", 64, 192, (7, 8), torch.bfloat16)
    total, y = OPS.add_norm(*given)
    rotated = (total, *OPS.rotate_tokens(y, signs, "hadamard", 64, (7, 8), to))
    plain = torch.zeros(9, 192).bfloat16()
    for beside in (None, plain):
        assert all(map(torch.equal, OPS.add_norm_rotated(*given, signs, 64, (7, 8), to, beside), rotated))
        torch.library.opcheck(OPS.add_norm_rotated.default, (*given, signs, 64, (7, 8), to, beside))
    assert torch.equal(plain, y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_norms_rotate_rows_as_quantize_rotated_does() -> None:
    x, other = torch.randn(2, 9, 160).half()
    given = (x, other, torch.randn(160).half(), None, False, 1e-5)
    signs = operands("hadamard", 32, 160, (7,), torch.float16)
    turned, plain = (signs, 32, (7,), torch.int8), torch.zeros(9, 160).half()
    total, y = OPS.add_norm(*given)
    want = (total, *OPS.quantize_rotated(y, signs, 32, 7))
    for op in (OPS.add_norm_rotated.default, OPS.add_norm_rotated.early_read):
        assert all(map(torch.equal, op(*given, *turned, plain, in_rows=True), want))
    assert torch.equal(plain, y)
    torch.library.opcheck(OPS.add_norm_rotated.default, (*given, *turned, None), {"in_rows": True})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    x, weight, turned = torch.randn(3, 8), torch.randn(8), torch.randn(8, 3).t()
    for plain in (None, torch.zeros(3, 8)):
        torch.library.opcheck(OPS.add_norm_int8.default, (x, x + 1, weight, weight, True, 1e-5, 16, plain))
    for first, second in ((x, x + 1), (turned, turned), (turned, x), (x, turned)):  # results are contiguous
        torch.library.opcheck(OPS.add_norm.default, (first, second, weight, weight, True, 1e-5))
        torch.library.opcheck(OPS.add_norm.default, (first, None, weight, None, False, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_residual_may_be_routes(dtype: torch.dtype) -> None:
    x, results = torch.randn(5, 64).to(dtype), torch.randn(15, 64).to(dtype)
    weight, routes = torch.randn(64).to(dtype), torch.rand(5, 3)
    added = OPS.sum_routes(results, routes, torch.zeros(5, 3, dtype=torch.int32), 1, None)
    end = (weight, None, False, 1e-5)
    for op, more in (
        (OPS.add_norm, ()),
        (OPS.add_norm_int8, (64, None)),
        (OPS.add_norm_rotated, (operands("hadamard", 64, 64, (7,), dtype), 64, (7,), torch.int8, None)),
    ):
        if op is OPS.add_norm_rotated and dtype is torch.float32:
            continue
        got, want = op(x, results, *end, *more, routes), op(x, added, *end, *more)
        assert all(map(torch.equal, got, want))
        torch.library.opcheck(op.default, (x, results, *end, *more, routes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"route_weights": torch.zeros(2, 3)}, errors.ShapeError, r"route_weights have no residual; allowed: \[2, k\]"),
        (
            {"route_weights": torch.zeros(3, 2), "residual": torch.zeros(6, 8)},
            errors.ShapeError,
            r"route_weights have shape \[3, 2\]; allowed: \[2, k\] and a residual",
        ),
        (
            {"route_weights": torch.zeros(2, 3), "residual": torch.zeros(2, 8)},
            errors.ShapeError,
            r"residual has shape \[2, 8\]; allowed: \[6, 8\]",
        ),
        (
            {"route_weights": torch.zeros(2, 3).half(), "residual": torch.zeros(6, 8)},
            errors.DtypeError,
            "route_weights is float16; allowed: float32",
        ),
        ({"x": torch.zeros(2, 3, 8)}, errors.ShapeError, r"x has shape \[2, 3, 8\]; allowed: \[M, K\]"),
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, errors.DtypeError, "x is int32"),
        ({"residual": torch.zeros(3, 8)}, errors.ShapeError, "residual has shape"),
        ({"weight": torch.zeros(8).half()}, errors.DtypeError, "weight is float16; allowed: float32"),
        ({"bias": torch.zeros(8)}, errors.ConfigError, "an RMS norm has no bias"),
    ],
)
def test_norms_refuse(changes: dict[str, Any], error: Any, message: str) -> None:
    given = {"x": torch.zeros(2, 8), "residual": None, "weight": torch.zeros(8), "bias": None}
    with pytest.raises(error, match=f"add_norm: .*{message}"):
        OPS.add_norm(**{**given, "layer": False, "eps": 1e-5, **changes})


@pytest.mark.parametrize("k_padded", [4, 20])
def test_int8_norms_refuse(k_padded: int) -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(errors.ShapeError, match=f"k_padded is {k_padded}; allowed: a multiple of 16 from 8 on"):
        OPS.add_norm_int8(x, None, weight, None, False, 1e-5, k_padded)
    with pytest.raises(errors.ShapeError, match=r"^qcut::add_norm_int8: weight has shape \[7\]"):
        OPS.add_norm_int8(x, None, weight[1:], None, False, 1e-5, 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 64), "weight": torch.zeros(64)}, errors.DtypeError, "x is float32; allowed: float16, bf"),
        ({"out_dtype": torch.bfloat16}, errors.DtypeError, "out_dtype is bfloat16; allowed: float16, int8"),
        ({"group_size": 16}, errors.ConfigError, "groups of 16 of 64 columns; allowed: whole ones of 32, 64 or 128"),
        ({"group_size": 128, "seeds": []}, errors.ConfigError, "no seed"),
        ({"in_rows": True}, errors.DtypeError, "out_dtype, in rows, is float16; allowed: int8"),
        (
            {"in_rows": True, "out_dtype": torch.int8, "seeds": [1, 2], "operands": torch.zeros(2, 4).int()},
            errors.ConfigError,
            "2 seeds; allowed: one, for rows of int8",
        ),
        ({"operands": torch.zeros(1, 2, dtype=torch.int32)}, errors.ShapeError, r"operands has shape \[1, 2\]"),
        ({"bias": torch.zeros(64).half()}, errors.ConfigError, "an RMS norm has no bias"),
    ],
)
def test_rotated_norms_refuse(changes: dict[str, Any], error: Any, message: str) -> None:
    x, weight = torch.zeros(2, 64).half(), torch.zeros(64).half()
    rotation = {"operands": torch.zeros(1, 4, dtype=torch.int32), "group_size": 32, "seeds": [1]}
    given = {"x": x, "residual": None, "weight": weight, "bias": None, "layer": False, "eps": 1e-5, **rotation}
    with pytest.raises(error, match=f"add_norm_rotated: .*{message}"):
        OPS.add_norm_rotated(**{**given, "out_dtype": torch.float16, **changes})


@pytest.mark.parametrize(
    ("plain", "error", "message"),
    [
        (torch.zeros(2, 64), errors.DtypeError, "plain is float32; allowed: float16"),
        (torch.zeros(3, 64).half(), errors.ShapeError, r"plain has shape \[3, 64\]; allowed: \[2, 64\]"),
        (torch.zeros(64, 2).half().t(), errors.ShapeError, r"plain has strides \[1, 2\]; allowed: contiguous"),
        (torch.zeros(2, 64, device="meta").half(), errors.DeviceError, "plain is on meta"),
    ],
)
def test_plain_norms_refuse(plain: torch.Tensor, error: Any, message: str) -> None:
    given = (torch.zeros(2, 64).half(), None, torch.zeros(64).half(), None, False, 1e-5)
    with pytest.raises(error, match=f"add_norm_rotated: {message}"):
        OPS.add_norm_rotated.early_read(*given, torch.zeros(1, 4, dtype=torch.int32), 64, [1], torch.int8, plain)
    with pytest.raises(error, match=f"add_norm_int8: {message}"):
        OPS.add_norm_int8.early_read(*given, 64, plain)
