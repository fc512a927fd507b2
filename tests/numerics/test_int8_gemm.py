"""Epilogues, activations and linear layers, against oracles that share no code with them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from qcut import errors
from qcut.numerics import int8 as numerics
from qcut.schemes import ACTIVATIONS, padded_k
from tests.support.oracles import F32, FLOATS, INF, NAN, epilogue_oracle, token_oracle


def layer(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    w = torch.randn(n, k)
    q, scale = numerics.quantize_weight(w)
    qweight = torch.zeros(n, padded_k(k), dtype=torch.int8)
    qweight[:, :k] = q
    return w, qweight, scale, torch.randn(n)


# ── epilogue ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
def test_every_epilogue_is_bitwise(int8, dtype):
    m, n, k = 5, 7, 300
    a, b = int8(m, k), int8(n, k, low=-127)
    acc = (a.long() @ b.long().t()).numpy()
    colsum = numerics.colsum_ref(b)
    residual = None if dtype is torch.int8 else (torch.randn(m, n) * 50).to(dtype)
    options = {
        "zp": (None, -77, torch.randint(-128, 128, (m,), dtype=torch.int32)),
        "row": (None, torch.rand(m) * 0.1),
        "col": (None, 0.0123, torch.rand(n) * 0.1 - 0.02),
        "bias": (None, torch.randn(n) * 10),
        "act": ("none", "relu"),
        "residual": (None, residual)[: 1 if residual is None else 2],
    }
    inv, out_zp = float(F32(0.0371)), -3
    for zp, row, col, bias, act, res in itertools.product(*options.values()):
        got = numerics.gemm_s8_ref(
            a,
            b,
            zero_point=zp,
            colsum=colsum,
            row_scale=row,
            col_scale=col,
            bias=bias,
            activation=act,
            residual=res,
            out_dtype=dtype,
            out_inv_scale=inv,
            out_zero_point=out_zp,
        )
        expected = epilogue_oracle(acc, zp, colsum, row, col, bias, act, res, dtype, inv, out_zp)
        assert got.dtype is dtype
        assert torch.equal(got, expected), (zp, row is None, col, bias is None, act, res is None)


def test_int8_output_ties_saturation_and_nan():
    a = torch.tensor([[1, 3, 5, -1, -3, 100, -100, 0]], dtype=torch.int8).t().contiguous()
    row_scale = torch.ones(8)
    row_scale[7] = NAN
    got = numerics.gemm_s8_ref(
        a,
        torch.ones(1, 1, dtype=torch.int8),
        row_scale=row_scale,
        col_scale=torch.tensor([0.5]),
        out_dtype=torch.int8,
        out_zero_point=90,
    )
    assert got.flatten().tolist() == [90, 92, 92, 90, 88, 127, 40, 0]


def test_zero_point_subtraction_is_exact_beyond_float32(int8):
    k = 66_311
    a, b = int8(1, k, "min"), int8(1, k, "max")
    colsum = numerics.colsum_ref(b)
    got = numerics.gemm_s8_ref(a, b, zero_point=127, colsum=colsum, out_dtype=torch.float32)
    assert got.item() == F32(-255 * 127 * k)
    got = numerics.gemm_s8_ref(a, b, zero_point=-128, colsum=colsum, out_dtype=torch.float32)
    assert got.item() == 0
    a[0, 0] = -127  # float32 would lose the 127 that is left of two sums of 2**30
    got = numerics.gemm_s8_ref(a, b, zero_point=-128, colsum=colsum, out_dtype=torch.float32)
    assert got.item() == 127


def test_requantization_multiplies_by_the_inverse_scale():
    a, b = (torch.arange(-128, 128).to(torch.int8)[:, None] for _ in range(2))
    acc = (a.long() @ b.long().t()).numpy()
    differs = 0
    for divisor in range(3, 300, 7):
        inv = float(F32(1) / F32(divisor))
        got = numerics.gemm_s8_ref(a, b, out_dtype=torch.int8, out_inv_scale=inv)
        expected = epilogue_oracle(acc, None, None, None, None, None, "none", None, torch.int8, inv, 0)
        assert torch.equal(got, expected)
        differs += int((np.rint(acc / divisor).clip(-128, 127) != expected.numpy()).sum())
    assert differs > 100, "the data cannot tell a product from a quotient"


@pytest.mark.parametrize("k", [1, 15, 16, 300, 131_071])
@pytest.mark.parametrize(
    ("kind_a", "kind_b"), [("random", "random"), ("min", "min"), ("min", "max"), ("checkerboard",) * 2]
)
def test_raw_outputs_are_the_sums_bits(int8, kind_a, kind_b, k):
    a, b = int8(3, k, kind_a), int8(5, k, kind_b)
    sums = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T
    got = numerics.gemm_s8_ref(a, b, out_dtype=torch.int32)
    assert got.dtype is torch.int32
    assert np.array_equal(got.numpy(), sums)
    wrapped = numerics.gemm_s8_ref(a, b, out_dtype=torch.int8, wrap=True)
    assert wrapped.dtype is torch.int8
    assert np.array_equal(wrapped.numpy().view(np.uint8), (sums & 255).astype(np.uint8))


def test_gemm_without_rows(int8):
    assert numerics.gemm_s8_ref(int8(0, 16), int8(3, 16)).shape == (0, 3)


def test_gemm_refuses():
    a = torch.zeros(1, 16, dtype=torch.int8)
    with pytest.raises(errors.ConfigError, match="a zero point needs colsum"):
        numerics.gemm_s8_ref(a, a, zero_point=1)
    with pytest.raises(errors.ConfigError, match="residual cannot be added to an int8"):
        numerics.gemm_s8_ref(a, a, residual=a, out_dtype=torch.int8)
    with pytest.raises(errors.ConfigError, match="activation 'tanh' does not exist"):
        numerics.gemm_s8_ref(a, a, activation="tanh")
    with pytest.raises(errors.ConfigError, match="wrap takes the low eight bits of a sum; out_dtype is float16"):
        numerics.gemm_s8_ref(a, a, wrap=True)
    for options in ({"bias": torch.zeros(1)}, {"out_zero_point": 1}, {"out_inv_scale": 2.0}, {"activation": "relu"}):
        for raw in ({"out_dtype": torch.int32}, {"out_dtype": torch.int8, "wrap": True}):
            with pytest.raises(errors.ConfigError, match="raw accumulators"):
                numerics.gemm_s8_ref(a, a, **raw, **options)


@pytest.mark.parametrize("activation", ["relu", "gelu_erf", "gelu_tanh", "silu"])
def test_activations_against_float64(activation):
    far = torch.cat([torch.logspace(-30, 38.5, 900), torch.tensor([torch.finfo().max])])
    x = torch.cat([torch.linspace(-30, 30, 20_011), far, -far])
    v = x.double()
    expected = {
        "relu": lambda: v.clamp(min=0),
        "gelu_erf": lambda: v * torch.special.erfc(-v * math.sqrt(0.5)) / 2,
        "gelu_tanh": lambda: v * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)),
        "silu": lambda: v * torch.sigmoid(v),
    }[activation]()
    got = numerics.apply_activation(x.clone(), activation)
    # A few rounded operations on factors of magnitude <= 2, times v: 4 ulp of v (2**-23 each) bounds them.
    tolerance = 0.0 if activation == "relu" else 4 * 2.0**-23
    assert ((got.double() - expected).abs() <= tolerance * v.abs()).all()
    assert numerics.apply_activation(torch.tensor([NAN]), activation).isnan().all()


# ── linear layers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7, 5), (5, 33, 129), (16, 64, 64)])
def test_w8a8_linear_is_its_formula(dtype, m, n, k):
    _, qweight, scale, bias = layer(n, k)
    x = torch.randn(m, k).to(dtype)
    q, x_scale = token_oracle(x)
    acc = (q.long() @ qweight[:, :k].long().t()).numpy()
    expected = epilogue_oracle(acc, None, None, x_scale, scale, bias, "relu", None, dtype, 1, 0)
    assert torch.equal(numerics.w8a8_linear_ref(x, qweight, scale, bias, "relu"), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_w8a8_static_linear_is_its_formula(dtype):
    m, n, k = 6, 19, 70
    _, qweight, scale, bias = layer(n, k)
    x = (torch.randn(m, k) + 1).to(dtype)
    x_scale, zp = numerics.static_qparams(-2.0, 3.5)
    col_scale = scale * torch.tensor(x_scale)
    q = np.clip(np.rint(x.float().numpy() / F32(x_scale)) + F32(zp), -128, 127).astype(np.int64)
    acc = (torch.from_numpy(q - zp) @ qweight[:, :k].long().t()).numpy()
    expected = epilogue_oracle(acc, None, None, None, col_scale, bias, "none", None, dtype, 1, 0)
    colsum = numerics.colsum_ref(qweight)
    got = numerics.w8a8_static_linear_ref(x, qweight, col_scale, colsum, bias, x_scale, zp, "none")
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_w8a16_linear_within_its_bound(dtype):
    m, n, k = 6, 19, 300
    _, qweight, scale, bias = layer(n, k)
    x = torch.randn(m, k).to(dtype)
    got = numerics.w8a16_linear_ref(x, qweight, scale, bias, "none")
    q = qweight[:, :k].double()
    expected = (x.double() @ q.t()) * scale.double() + bias.double()
    # The sum's bound as documented, two more float32 roundings, and the rounding to dtype.
    bound = (k + 2) * 2.0**-23 * ((x.double().abs() @ q.abs().t()) * scale.double() + bias.double().abs())
    bound += torch.finfo(dtype).eps * expected.abs()
    assert got.dtype is dtype
    assert ((got.double() - expected).abs() <= bound).all()


def test_schemes_keep_the_signal():
    w, qweight, scale, bias = layer(256, 512)
    x = torch.randn(64, 512)
    ref = x @ w.t() + bias
    x_scale, zp = numerics.static_qparams(float(x.min()), float(x.max()))
    colsum = numerics.colsum_ref(qweight)
    w8a8 = numerics.sqnr_db(ref, numerics.w8a8_linear_ref(x, qweight, scale, bias, "none"))
    static = numerics.sqnr_db(
        ref, numerics.w8a8_static_linear_ref(x, qweight, scale * x_scale, colsum, bias, x_scale, zp, "none")
    )
    w8a16 = numerics.sqnr_db(ref, numerics.w8a16_linear_ref(x, qweight, scale, bias, "none"))
    # Uniform noise of a step of max/127 (3.3 sigma / 127) in both operands is 37 dB under a Gaussian signal.
    assert w8a8 > 37
    assert static > 35
    assert w8a16 > 40
    assert w8a16 > w8a8 > static


def test_nan_token_makes_only_its_row_nan():
    _, qweight, scale, bias = layer(9, 20)
    x = torch.randn(4, 20)
    clean = numerics.w8a8_linear_ref(x, qweight, scale, bias, "relu")
    x[1, 2] = INF
    got = numerics.w8a8_linear_ref(x, qweight, scale, bias, "relu")
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_do_not_depend_on_each_other(activation):
    _, qweight, scale, bias = layer(33, 40)
    x = torch.randn(17, 40)
    whole = numerics.w8a8_linear_ref(x, qweight, scale, bias, activation)
    rows = torch.cat([numerics.w8a8_linear_ref(r, qweight, scale, bias, activation) for r in x.split(1)])
    assert torch.equal(whole, rows)
