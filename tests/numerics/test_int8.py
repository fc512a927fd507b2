"""Quantizers and exact products, against oracles that share no code with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qcut import errors
from qcut.numerics import int8 as numerics
from qcut.schemes import K_MAX
from tests.support.oracles import F32, FLOATS, INF, NAN, near_ties, rounded, token_oracle

# ── weights and tokens ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 17), (33, 129), (5, 1024)])
def test_quantize_matches_the_oracle(dtype, m, k):
    x = (torch.randn(m, k) * torch.logspace(-4, 4, m)[:, None]).to(dtype)
    q, scale = token_oracle(x)
    for got_q, got_scale in (numerics.quantize_weight(x), numerics.quantize_per_token_ref(x, k)):
        assert got_q.dtype is torch.int8
        assert torch.equal(got_q, q)
        assert torch.equal(got_scale, scale)
    assert torch.equal(numerics.weight_qparams(x), scale)


def test_quantize_divides_by_the_scale():
    x = near_ties()
    q, scale = token_oracle(x)
    by_reciprocal = (x * (1 / scale)[:, None]).round().to(torch.int8)
    assert (by_reciprocal != q).sum() > 100, "the data cannot tell the two apart"
    assert torch.equal(numerics.quantize_weight(x)[0], q)
    assert torch.equal(numerics.quantize_per_token_ref(x, x.shape[1])[0], q)


def test_ties_round_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    expected = [[127, 0, 2, 2, 0, -2, -2, 126]]
    assert numerics.quantize_weight(x)[0].tolist() == expected
    assert numerics.quantize_per_token_ref(x, 8)[0].tolist() == expected
    assert numerics.quantize_per_tensor_ref(x, 1.0, 0, 8).tolist() == expected


def test_zero_and_subnormal_rows_have_scale_one():
    tiny = 2.0**-149
    x = torch.tensor([[0.0, 0.0], [tiny, -tiny], [63 * tiny, 0.0], [64 * tiny, -64 * tiny], [127.0, -1.0]])
    q, scale = numerics.quantize_weight(x)
    assert scale.tolist() == [1.0, 1.0, 1.0, tiny, 1.0]  # 64/127 of the smallest subnormal rounds to one of it
    assert q.tolist() == [[0, 0], [0, 0], [0, 0], [64, -64], [127, -1]]
    assert torch.equal(numerics.quantize_per_token_ref(x, 2)[0], q)


def test_weights_whose_scales_are_all_subnormal_are_refused():
    least = numerics.LEAST_MAGNITUDE
    scale = numerics.weight_qparams(torch.tensor([[0.0, -least], [1e-45, 0.0]]))
    assert scale.tolist() == [torch.finfo(torch.float32).tiny, 1.0]
    message = r"^layer 'fc': the weight's largest magnitude is 7\.4\d*e-37; allowed: 1\.493e-36 and more"
    with pytest.raises(errors.QuantizationError, match=message):
        numerics.weight_qparams(torch.tensor([[0.0, -least / 2], [1e-45, 0.0]]), layer="fc")


def test_float32_extremes_do_not_overflow():
    big = torch.finfo(torch.float32).max
    q, scale = numerics.quantize_weight(torch.tensor([[big, -big, 0.0]]))
    assert q.tolist() == [[127, -127, 0]]
    assert scale.isfinite().all()


def test_weights_in_chunks_and_transposed_are_the_same(monkeypatch):
    w = torch.randn(37, 19)
    q, scale = token_oracle(w)
    monkeypatch.setattr(numerics, "_CHUNK_ELEMENTS", 19 * 5)
    assert torch.equal(numerics.quantize_weight(w)[0], q)
    assert torch.equal(numerics.weight_qparams(w), scale)
    assert torch.equal(numerics.quantize_weight(w.t().contiguous().t())[0], q)
    assert torch.equal(numerics.quantize_weight(w.double())[0], q)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_weight_with_bad_values_names_layer_and_row(bad):
    w = torch.ones(5, 4)
    w[3, 1] = w[4, 0] = bad
    with pytest.raises(errors.QuantizationError, match=r"layer 'h\.1': weight holds NaN or Inf in 2 of 5 rows.* row 3"):
        numerics.quantize_weight(w, layer="h.1")


def test_float64_weight_beyond_float32_is_refused():
    with pytest.raises(errors.QuantizationError, match="must be finite in float32"):
        numerics.quantize_weight(torch.full((1, 1), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2)])
def test_weight_of_wrong_shape(shape):
    with pytest.raises(errors.QuantizationError, match=r"layer 'l': weight has shape .*; allowed: \[N, K\]"):
        numerics.quantize_weight(torch.ones(shape), layer="l")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_tokens_propagate_alone(bad):
    x = torch.randn(4, 7)
    clean_q, clean_scale = numerics.quantize_per_token_ref(x, 16)
    x[2, 3] = bad
    q, scale = numerics.quantize_per_token_ref(x, 16)
    assert scale[2].isnan()
    assert (q[2] == 0).all()
    keep = [0, 1, 3]
    assert torch.equal(q[keep], clean_q[keep])
    assert torch.equal(scale[keep], clean_scale[keep])


def test_padding_and_no_tokens():
    q, scale = numerics.quantize_per_token_ref(torch.randn(3, 5), 16)
    assert (q[:, 5:] == 0).all()
    assert (q[:, :5] != 0).any()
    q, scale = numerics.quantize_per_token_ref(torch.empty(0, 5), 16)
    assert (q.shape, scale.shape) == ((0, 16), (0,))
    assert numerics.quantize_per_tensor_ref(torch.empty(0, 5), 1.0, 0, 16).shape == (0, 16)


# ── static activations ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lo", "hi", "scale", "zero_point"),
    [
        (0.0, 255.0, 1.0, -128),
        (-255.0, 0.0, 1.0, 127),
        (-128.0, 127.0, 1.0, 0),
        (-127.5, 127.5, 1.0, 0),  # -0.5, a tie
        (-126.5, 128.5, 1.0, -2),  # -1.5, a tie
        (0.0, 0.0, 1.0, -128),
        (0.0, 2.0**-149, 1.0, -128),
        (0.0, 1.0, float(F32(1) / F32(255)), -128),
        (-1.0, 3.0, float(F32(4) / F32(255)), -64),
    ],
)
def test_static_qparams(lo, hi, scale, zero_point):
    assert numerics.static_qparams(lo, hi) == (scale, zero_point)


@pytest.mark.parametrize(("lo", "hi"), [(1.0, 2.0), (NAN, 1.0), (-3e38, 3e38), (-1e300, 0.0)])
def test_static_qparams_refuses(lo, hi):
    with pytest.raises(errors.ConfigError, match="static range"):
        numerics.static_qparams(lo, hi)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zero_point", [-128, -3, 0, 127])
def test_per_tensor_matches_the_oracle(dtype, zero_point):
    scale = float(F32(0.037))
    x = torch.cat([torch.randn(64, 33) * 4, near_ties()[:64, :33], torch.full((1, 33), 1e4)]).to(dtype)
    expected = np.clip(np.rint(x.float().numpy() / F32(scale)) + F32(zero_point), -128, 127).astype(np.int8)
    q = numerics.quantize_per_tensor_ref(x, scale, zero_point, 48)
    assert torch.equal(q[:, :33], torch.from_numpy(expected))
    assert (q[:, 33:] == 0).all()


def test_per_tensor_special_values():
    x = torch.tensor([[0.0, -0.0, NAN, INF, -INF]])
    assert numerics.quantize_per_tensor_ref(x, 0.5, -7, 5).tolist() == [[-7, -7, -7, 127, -128]]


# ── exact products ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("int_mm", [True, False], ids=["int_mm", "float32 chunks"])
@pytest.mark.parametrize("kind", ["random", "min", "max", "checkerboard"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 5, 1), (2, 3, 15), (17, 9, 1025), (3, 2, 2047), (33, 130, 2085)]
)
def test_products_are_exact(int8, monkeypatch, int_mm, kind, m, n, k):
    if not int_mm:
        monkeypatch.setattr(numerics, "_int_mm_is_exact", lambda: False)
    a, b = int8(m, k, kind), int8(n, k, kind)
    got = numerics.matmul_s8(a, b)
    assert got.dtype is torch.int32
    assert torch.equal(got.long(), a.long() @ b.long().t())
    strided = numerics.matmul_s8(a.t().contiguous().t(), b.repeat(1, 2)[:, :k])
    assert torch.equal(strided, got)


@pytest.mark.parametrize("int_mm", [True, False], ids=["int_mm", "float32 chunks"])
def test_products_are_exact_at_the_largest_k(int8, monkeypatch, int_mm):
    if not int_mm:
        monkeypatch.setattr(numerics, "_int_mm_is_exact", lambda: False)
    got = numerics.matmul_s8(int8(2, K_MAX, "min"), int8(1, K_MAX, "min"))
    assert got.tolist() == [[2**14 * K_MAX]] * 2


def test_int_mm_that_saturates_is_found_out(monkeypatch):
    def saturating(a, b):
        pairs = (a.long()[:, :, None] * b.long()[None]).unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
        return pairs.sum(1).to(torch.int32)

    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not numerics._int_mm_is_exact.__wrapped__()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False, raising=False)
    assert not numerics._int_mm_is_exact.__wrapped__()


def test_colsum_and_dequantize(int8):
    q = int8(9, 1030)
    assert torch.equal(numerics.colsum_ref(q).long(), q.long().sum(1))
    assert numerics.colsum_ref(int8(1, K_MAX, "min")).tolist() == [-128 * K_MAX]
    scale = torch.rand(9)
    for dtype in FLOATS:
        expected = rounded(q.numpy().astype(F32) * scale.numpy()[:, None], dtype)
        assert torch.equal(numerics.dequantize_ref(q, scale, dtype), expected)


def test_sqnr():
    ref = torch.tensor([3.0, 4.0])
    assert numerics.sqnr_db(ref, ref) == INF
    assert numerics.sqnr_db(ref, ref * 0.9) == pytest.approx(20.0, abs=1e-4)
    assert numerics.sqnr_db(ref * 0, ref) < -1000
