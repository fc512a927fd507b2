"""Weights in 8-bit floats: the nearest of them, held against their definition in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from qcut.errors import ConfigError, QuantizationError
from qcut.layers.float8 import Float8Linear
from qcut.layers.linear import Linear
from qcut.numerics import float8
from qcut.numerics.int8 import w8a16_linear_ref
from qcut.schemes import padded_k
from tests.support.oracles import FLOATS


def value(code: int) -> Fraction:
    """Of a code without its sign, by the definition."""
    exponent, fraction = code >> 3, code & 7
    if exponent == 0:
        return Fraction(fraction, 8) / 64
    return (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)


VALUES = [value(code) for code in range(127)]


def nearest(weight: Fraction) -> int:
    """The code of the nearest value; of two as near the even code, which has an even fraction."""
    magnitude = abs(weight)
    distances = [abs(magnitude - v) for v in VALUES]
    least = min(distances)
    codes = [code for code, distance in enumerate(distances) if distance == least]
    code = next(code for code in codes if len(codes) == 1 or code % 2 == 0)
    return code | (0x80 if weight < 0 or (weight == 0 and code & 0x80) else 0)


def test_codes_are_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    halves = [float((a + b) / 2) for a, b in pairwise(VALUES)]
    w = torch.cat((torch.tensor(halves), torch.randn(274, generator=generator) * 100)).repeat(2).view(2, -1)
    w[1] *= -1
    w[:, -1] = 448.0  # the scale of each row is 1
    q, scale = float8.quantize_weight(w)
    assert torch.equal(scale, torch.ones(2))
    for row, codes in zip(w.tolist(), q.view(torch.uint8).tolist(), strict=True):
        assert codes == [nearest(Fraction(weight)) for weight in row]


def test_scales_are_of_rows() -> None:
    w = torch.randn(5, 40)
    w[2] = 0
    q, scale = float8.quantize_weight(w)
    want = torch.where(w.abs().amax(1) > 0, w.abs().amax(1) / 448, 1.0)
    assert torch.equal(scale, want)
    assert not q.float()[2].any()
    # Half a unit of a fraction of three bits, or of the least exponent.
    error = (q.float() * scale[:, None] - w).abs()
    assert bool((error <= torch.maximum(w.abs() * 2.0**-4, scale[:, None] * 2.0**-10) * (1 + 1e-6)).all())


def test_what_is_not_finite_is_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(QuantizationError, match=r"layer 'fc': weight holds NaN or Inf"):
            float8.quantize_weight(torch.tensor([[1.0, bad]]), layer="fc")
    with pytest.raises(QuantizationError, match="largest magnitude"):
        float8.quantize_weight(torch.full((2, 2), 1e-38))


def test_a_layer_computes_with_its_floats() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(70, 33)
    layer = Linear.from_float(linear, "fp8")
    assert isinstance(layer, Float8Linear)
    q, scale = float8.quantize_weight(linear.weight.detach())
    assert torch.equal(layer.dequantized_weight(), q.float() * scale[:, None])
    assert torch.equal(layer.rows(torch.tensor([32, 0])), layer.dequantized_weight()[[32, 0]])
    x = torch.randn(3, 70).half()
    assert torch.equal(layer(x), w8a16_linear_ref(x, layer.qweight, layer.weight_scale, layer.bias, "none"))
    exact = x.double() @ layer.dequantized_weight().double().t() + linear.bias.double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=2.0**-10, atol=2.0**-10)


@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 300), (16, 128), (1, 1), (129, 257)])
def test_blocks_have_a_scale_each(n: int, k: int) -> None:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 3
    w[:128, :128] = 0
    q, scale = float8.quantize_blocks(w)
    assert q.dtype is float8.E4M3
    assert scale.shape == (-(-n // 16), -(-k // 128))
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            block = w[row : row + 128, column : column + 128]
            codes, one = float8.quantize_weight(block.reshape(1, -1))
            assert torch.equal(q[row : row + 128, column : column + 128].float(), codes.float().view(block.shape))
            assert bool((scale[row // 16 : (row + 128) // 16, column // 128] == one).all())
    want = torch.empty(n, k)
    for i in range(n):
        want[i] = q[i].float() * scale[i // 16].repeat_interleave(128)[:k]
    assert torch.equal(float8.dequantize(q, scale), want)


def test_blocks_that_are_not_finite_are_refused() -> None:
    with pytest.raises(QuantizationError, match=r"layer 'fc': weight holds NaN or Inf"):
        float8.quantize_blocks(torch.full((3, 200), float("inf")), layer="fc")


@pytest.mark.parametrize(("n", "k"), [(33, 70), (130, 300)])
def test_a_layer_of_blocks_computes_with_its_floats(n: int, k: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(k, n)
    layer = Linear.from_float(linear, "fp8_blocks")
    q, scale = float8.quantize_blocks(linear.weight.detach())
    weight = layer.dequantized_weight()
    assert torch.equal(weight, float8.dequantize(q, scale))
    assert torch.equal(layer.rows(torch.tensor([32, 0])), weight[[32, 0]])
    x = torch.randn(3, k).half()
    exact = x.double() @ weight.double().t() + linear.bias.double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=2.0**-10, atol=2.0**-10)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


def hard_tokens(dtype: torch.dtype) -> Tensor:
    """Rows of every size, of zeros, and with what is not finite."""
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(3))
    for row, factor in enumerate((1.0, 1e-30, 1e-42, 0.0, 1e36, 1e-3)):
        x[row] *= factor
    x[4] = x[4].clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    x[6, 7], x[7, 0], x[8, 299] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_are_the_nearest_of_the_scaled(dtype: torch.dtype) -> None:
    x = hard_tokens(dtype)
    q, scale = float8.quantize_tokens_ref(x, 304)
    assert (q.dtype, q.shape, scale.dtype) == (float8.E4M3, (9, 304), torch.float32)
    assert scale.isnan().tolist() == [False] * 6 + [True] * 3
    assert not q.float()[6:].any()
    assert not q.float()[:, 300:].any()
    for row, one, codes in zip(x[:6].float(), scale[:6], q[:6, :300].view(torch.uint8), strict=True):
        assert one == max(row.abs().max() / torch.tensor(448.0), torch.tensor(2.0**-126))
        scaled = (row * (torch.tensor(1.0) / one)).clamp(-448, 448)
        assert [code & 127 for code in codes.tolist()] == [nearest(Fraction(float(v))) & 127 for v in scaled]


def test_tokens_of_one_scale_saturate() -> None:
    scale = float8.static_scale(-2.0, 4.48)
    assert scale == float(torch.tensor(4.48) / torch.tensor(448.0))
    x = torch.tensor([[4.48, -9.0, 0.0, float("inf"), -float("inf"), 1e-9, 0.01]])
    q = float8.quantize_tensor_ref(x, scale, 16).float()[0]
    assert q[:5].tolist() == [448.0, -448.0, 0.0, 448.0, -448.0]
    assert (q[5], q[6], q[7:].any()) == (0.0, 1.0, False)
    assert float8.quantize_tensor_ref(torch.tensor([[1.0, float("nan")]]), scale, 2).float()[0].isnan().tolist() == [
        False,
        True,
    ]


def test_scales_of_ranges() -> None:
    assert float8.static_scale(0.0, 0.0) == 1.0
    assert float8.static_scale(-448.0, 3.0) == 1.0
    assert float8.static_scale(0.0, 1e-44) == 2.0**-126
    with pytest.raises(ConfigError, match="too wide for float32"):
        float8.static_scale(-1e39, 0.0)
    with pytest.raises(ConfigError, match="not finite with lo <= 0 <= hi"):
        float8.static_scale(1.0, 2.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [16, 130, 4096])
def test_products_of_floats_keep_their_bound(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    x, bias = torch.randn(5, k, generator=generator).to(dtype), torch.randn(9, generator=generator)
    weight, s_w = float8.quantize_weight(torch.randn(9, k, generator=generator))
    qweight = torch.zeros(9, padded_k(k), dtype=torch.int8).view(float8.E4M3)
    qweight[:, :k] = weight
    q, s_x = float8.quantize_tokens_ref(x, padded_k(k))
    one = float8.static_scale(-4.0, 3.0)
    static = float8.quantize_tensor_ref(x, one, padded_k(k))
    for tokens, row, col, got in (
        (q, s_x, s_w, float8.dynamic_linear_ref(x, qweight, s_w, bias, "none")),
        (static, torch.ones(5), s_w * one, float8.static_linear_ref(x, qweight, s_w * one, bias, one, "none")),
    ):
        factor = row.double()[:, None] * col.double()
        exact = tokens.double() @ qweight.double().t() * factor + bias.double()
        size = tokens.double().abs() @ qweight.double().abs().t() * factor
        unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[dtype]
        allowed = (k * 2.0**-23 + 2.0**-22) * size + (unit + 2.0**-23) * exact.abs() + 1e-7
        assert bool(((got.double() - exact).abs() <= allowed).all())
        assert got.dtype is dtype
