"""Weights, biases and ranges at both ends of the stored types: within the scheme's error, or refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import QcutError, QuantizationError, QuantizationWarning

SCHEMES = (
    "w8a8",
    "w8a8_static",
    "w8a16",
    "fp8_dynamic",
    "fp8_static",
    "int16x8_static",
    "codebook4_g32",
    "codebook4+4_g32",
    "int4",
    "codebook3_none",
    "nvfp4",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def made(weight: torch.Tensor, scheme: str | qcut.Codebook, bias: torch.Tensor | None = None) -> qcut.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    static = qcut.StaticRange(-4, 4) if "static" in str(scheme) else None
    return qcut.Linear.from_float(layer, scheme, static_range=static, name="the.layer")


def error(weight: torch.Tensor, layer: qcut.Linear) -> float:
    exact = weight.double()
    largest = exact.abs().max().clamp_min(1e-300)
    return float(((layer.dequantized_weight().double() - exact) / largest).norm() / (exact / largest).norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_size_is_kept_or_refused(scheme: str) -> None:
    torch.manual_seed(6)
    plain = torch.randn(16, 64, dtype=torch.float64)
    usual, refused = error(plain, made(plain, scheme)), 0
    for exponent in range(-46, 39, 2):
        for dtype in DTYPES:
            weight = (plain * 10.0**exponent).to(dtype)
            if not weight.isfinite().all() or not weight.any():
                continue
            coarse = float((weight.double() / 10.0**exponent - plain).norm() / plain.norm())
            try:
                layer = made(weight, scheme)
            except QuantizationError as failure:
                refused += "the.layer" in str(failure)
                continue
            assert error(weight, layer) < 1.3 * usual + coarse, (exponent, dtype)
            assert layer(torch.zeros(2, 64)).isfinite().all()
    assert refused


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("factor", [0.0, 1e-42, 1e-30, 1e-9, 1e3])
def test_one_row_of_another_size(scheme: str, factor: float) -> None:
    torch.manual_seed(7)
    weight = torch.randn(16, 64)
    usual = error(weight, made(weight, scheme))
    weight[5] *= factor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = made(weight, scheme)
    assert error(weight, layer) < 1.5 * usual
    assert layer(torch.randn(3, 64)).isfinite().all()
    lost = bool(weight[5].any()) and not layer.dequantized_weight()[5].any()
    told = [str(w.message) for w in caught if w.category is QuantizationWarning]
    assert not lost or (len(told) == 1 and "the.layer" in told[0] and "row 5" in told[0])


def test_float32_norms_keep_small_rows() -> None:
    torch.manual_seed(8)
    weight = torch.randn(16, 64)
    weight[5] *= 1e-12
    layer = made(weight, qcut.Codebook(group_size=32, norm_dtype="fp32"))
    assert error(weight[5:6] * 1e12, made(weight[5:6] * 1e12, "codebook4_g32")) < 0.2
    assert float((layer.dequantized_weight()[5] - weight[5]).norm() / weight[5].norm()) < 0.2


@pytest.mark.parametrize(("lo", "hi"), [(-1e-44, 1e-44), (0.0, 1e-30), (-1e30, 1e30), (-3e38, 3e38)])
@pytest.mark.parametrize("scheme", ["w8a8_static", "int16x8_static", "fp8_static"])
def test_ranges_give_finite_results_or_errors(scheme: str, lo: float, hi: float) -> None:
    layer = nn.Linear(32, 8)
    try:
        quantized = qcut.Linear.from_float(layer, scheme, static_range=qcut.StaticRange(lo, hi), name="the.layer")
    except QcutError:
        return
    assert quantized(torch.full((2, 32), hi / 2)).isfinite().all()


def test_biases_beyond_float32_are_refused() -> None:
    weight = torch.randn(8, 32)
    with pytest.raises(QuantizationError, match=r"the\.layer"):
        made(weight, "w8a8", torch.full((8,), 1e39, dtype=torch.float64))
    tiny = made(weight, "w8a8", torch.full((8,), 1e-42))
    assert float(tiny.bias[0]) == pytest.approx(1e-42, rel=1e-2)
