"""Products that take part in a norm, on the CPU: definitions, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.config import K_MAX, padded_k
from qcut.numerics import int8 as numerics
from tests.support.folded import EPS, Operands, check, operands
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut


def residual_of(of: Operands, dtype: torch.dtype) -> Tensor:
    return torch.randn(len(of.x), len(of.qweight), generator=torch.Generator().manual_seed(1)).to(dtype)


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("layer", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_norm_and_a_product(dtype: torch.dtype, layer: bool, bias: bool) -> None:
    of = operands(5, 19, 70, layer=layer, dtype=dtype, bias=bias)
    check(OPS.normed_linear(*of.given()), of)


@pytest.mark.parametrize("layer", [True, False])
def test_it_is_near_the_norm_before_the_product(layer: bool) -> None:
    """Both quantize to 8 bits, at other places: their difference is as large as one quantization's."""
    of = operands(8, 64, 256, layer=layer, dtype=torch.float32)
    if layer:
        assert of.shift is not None
        normed = F.layer_norm(of.x, of.x.shape[1:], of.gain, of.shift, EPS)
    else:
        normed = F.rms_norm(of.x, of.x.shape[1:], of.gain, EPS)
    weight = of.qweight.float() * of.weight_scale[:, None]
    exact = F.linear(normed, weight, of.bias)
    before = OPS.w8a8_linear(normed, of.qweight, of.weight_scale, of.bias, "none")
    folded = OPS.normed_linear(*of.given())
    assert numerics.sqnr_db(exact, folded) > numerics.sqnr_db(exact, before) - 1.0


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
def test_activations_and_magnitudes(activation: str) -> None:
    of, absmax = operands(3, 19, 70, layer=True), torch.tensor([0.0, 2.0**99, 0.0])
    y = OPS.normed_linear(*of.given(activation), absmax)
    plain = OPS.normed_linear(*operands(3, 19, 70, layer=True).given())
    torch.testing.assert_close(y.float(), numerics.apply_activation(plain.float(), activation), rtol=2e-3, atol=1e-3)
    assert absmax.tolist() == [y[0].abs().max(), 2.0**99, y[2].abs().max()]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_onto_a_residual_is_the_sum_and_notes_its_norm(dtype: torch.dtype) -> None:
    of = operands(4, 19, 70, layer=False, dtype=dtype)
    residual, gain, absmax = residual_of(of, dtype), torch.randn(19).to(dtype), torch.zeros(4)
    weight = of.qweight, of.weight_scale, of.bias
    largest = of.x.float().abs().amax(1)
    y = OPS.residual_linear(of.x, largest, *weight, residual, gain, absmax)
    q, scale = OPS.quantize_per_token(of.x, padded_k(70))
    want = numerics.gemm_s8_ref(
        q, of.qweight, row_scale=scale, col_scale=of.weight_scale, bias=of.bias, residual=residual, out_dtype=dtype
    )
    assert torch.equal(y, want)
    assert torch.equal(absmax, (y.float() * gain.float()).abs().amax(1))
    assert torch.equal(OPS.residual_linear(of.x, largest, *weight, residual), want)


def test_a_row_of_nan_is_nan_and_no_other() -> None:
    of = operands(3, 19, 70, layer=True)
    of.x[1, 4] = float("nan")
    y = OPS.normed_linear(*of.given())
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_a_row_of_zeros_has_the_norms_bias() -> None:
    of = operands(2, 19, 70, layer=True, dtype=torch.float32)
    of.x[0] = 0
    given = of.given()
    torch.testing.assert_close(OPS.normed_linear(*given)[0], given[7])


# ── registration, refusals ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("m", [0, 3])
def test_fakes_and_schemas(m: int) -> None:
    of, absmax = operands(m, 19, 70, layer=True), torch.zeros(m)
    check_residual = (of.x, torch.zeros(m), of.qweight, of.weight_scale, of.bias, residual_of(of, of.x.dtype))
    torch.library.opcheck(OPS.normed_linear.default, (*of.given(), absmax))
    torch.library.opcheck(OPS.residual_linear.default, (*check_residual, torch.ones(19).half(), absmax))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"gain": torch.ones(69).half()}, errors.ShapeError, r"gain has shape \[69\]; allowed: \[70\]"),
        ({"gain": torch.ones(70)}, errors.DtypeError, "gain"),
        ({"gain_sums": torch.ones(18)}, errors.ShapeError, r"gain_sums has shape \[18\]; allowed: \[19\]"),
        ({"x_absmax": torch.ones(2)}, errors.ShapeError, "x_absmax"),
        ({"activation": "tanh"}, errors.ConfigError, "tanh"),
        ({"absmax": torch.ones(6)[::2]}, errors.ShapeError, "absmax has strides"),
        ({"qweight": torch.ones(19, 64, dtype=torch.int8)}, errors.ShapeError, "qweight"),
        ({"x": torch.ones(70).half()}, errors.ShapeError, r"\[M, K\]"),
    ],
)
def test_normed_linear_refuses(change: dict[str, Any], error: type[Exception], match: str) -> None:
    names = ("x", "x_absmax", "gain", "gain_sums", "eps", "qweight", "weight_scale", "bias", "activation")
    given = dict(zip(names, operands(3, 19, 70, layer=True).given(), strict=True)) | change
    with pytest.raises(error, match=match):
        OPS.normed_linear(**given)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"residual": torch.ones(3, 18).half()}, errors.ShapeError, "residual"),
        ({"residual": torch.ones(19, 3).half().t()}, errors.ShapeError, "residual has strides"),
        ({"gain": torch.ones(19).half()}, errors.ShapeError, "both or neither"),
        ({"gain": torch.ones(18).half(), "absmax": torch.ones(3)}, errors.ShapeError, "gain"),
    ],
)
def test_residual_linear_refuses(change: dict[str, Any], error: type[Exception], match: str) -> None:
    of = operands(3, 19, 70, layer=False)
    given = {"x": of.x, "x_absmax": torch.ones(3), "qweight": of.qweight, "weight_scale": of.weight_scale}
    given |= {"bias": of.bias, "residual": residual_of(of, of.x.dtype), **change}
    with pytest.raises(error, match=match):
        OPS.residual_linear(**given)


def test_sums_beyond_int32_are_refused() -> None:
    k = K_MAX + 1
    weight = torch.zeros(1, padded_k(k), dtype=torch.int8, device="meta")
    with pytest.raises(errors.QuantizationError, match=f"K is {k}"):
        OPS.residual_linear(
            torch.zeros(1, k, device="meta"),
            torch.zeros(1, device="meta"),
            weight,
            torch.zeros(1, device="meta"),
            None,
            torch.zeros(1, 1, device="meta"),
        )
