"""int16 tokens with int8 weights: quantization, halves and sums, against numpy and Python's integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics import int8, int16
from qcut.schemes import K_MAX, padded_k
from tests.support.oracles import F32, FLOATS, INF, NAN, epilogue_oracle, layer, normal


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """In numpy: one rounding an operation."""
    a = x.float().numpy()
    peak = np.abs(a).max(1)
    scale = np.where(peak == 0, F32(1), np.maximum(peak / F32(int16.LARGEST), F32(2.0**-126)))
    return torch.from_numpy(np.rint(a * (F32(1) / scale)[:, None]).astype(np.int16)), torch.from_numpy(scale)


def exact_sums(q: Tensor, qweight: Tensor) -> Tensor:
    return q.long() @ qweight.long().t()


def rows_of_every_size(dtype: torch.dtype) -> Tensor:
    x = normal(12, 200)
    x[1] = 0
    x[2] *= 1e30
    x[3] *= 1e-30
    x[4] *= 1e-40
    x[5] = 1e-45
    x[6, 7] = 1e4
    x[7] = torch.finfo(dtype).max * torch.sign(x[7])
    x[8] *= torch.finfo(dtype).smallest_normal
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_are_quantized_by_their_largest_magnitude(dtype: torch.dtype) -> None:
    x = rows_of_every_size(dtype)
    q, scale = int16.quantize_tokens_ref(x, 208)
    want, want_scale = quantized(x)
    assert (q.dtype, q.shape) == (torch.int16, (12, 208))
    assert torch.equal(q[:, :200], want)
    assert torch.equal(scale, want_scale)
    assert not q[:, 200:].any()
    assert scale[1] == 1
    assert q.abs().max() == int16.LARGEST
    ordinary = scale > int16.SMALLEST_SCALE
    assert bool((q.abs().amax(1)[ordinary & (scale != 1)] == int16.LARGEST).all())


def test_values_come_back_within_half_a_step() -> None:
    x = rows_of_every_size(torch.float32)
    q, scale = int16.quantize_tokens_ref(x, 200)
    error = (q.double() * scale.double()[:, None] - x.double()).abs()
    assert bool((error <= (0.5 + 2**-8) * scale.double()[:, None]).all())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_token_gets_a_nan_scale_and_zeros(bad: float) -> None:
    x = normal(3, 20)
    x[1, 4] = bad
    q, scale = int16.quantize_tokens_ref(x, 32)
    assert scale.isnan().tolist() == [False, True, False]
    assert not q[1].any()
    assert torch.equal(q[::2, :20], quantized(x[::2])[0])


def test_a_static_range_is_symmetric() -> None:
    for lo, hi, largest in ((-2.0, 5.0, 5.0), (-7.0, 0.0, 7.0), (0.0, 1e-42, 0.0), (0.0, 0.0, int16.LARGEST)):
        want = max(F32(largest) / F32(int16.LARGEST), F32(2.0**-126))
        assert int16.static_scale(lo, hi) == float(want)
    for lo, hi in ((1.0, 2.0), (-1e39, 0.0)):
        with pytest.raises(ConfigError, match="static range"):
            int16.static_scale(lo, hi)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_saturate_at_a_static_range(dtype: torch.dtype) -> None:
    x = normal(5, 40).to(dtype)
    x[1, 2], x[2, 3], x[3, 4] = NAN, INF, -INF
    scale = int16.static_scale(-1.0, 0.5)
    q = int16.quantize_tensor_ref(x, scale, 48)
    with np.errstate(invalid="ignore"):
        want = np.rint(x.float().numpy() * (F32(1) / F32(scale)))
        want = np.clip(np.nan_to_num(want, nan=0.0), -int16.LARGEST, int16.LARGEST).astype(np.int16)
    assert torch.equal(q[:, :40], torch.from_numpy(want))
    assert not q[:, 40:].any()
    assert (q[2, 3], q[3, 4], q[1, 2]) == (int16.LARGEST, -int16.LARGEST, 0)


def test_halves_of_all_int16() -> None:
    q = torch.arange(-(2**15), int16.LARGEST + 1).to(torch.int16)
    high, low = int16.halves(q)
    assert high.dtype is low.dtype is torch.int8
    assert torch.equal(256 * high.int() + low.int(), q.int())
    assert int16.LARGEST == 256 * 127 + 127


@pytest.mark.parametrize("m", [0, 1, 7, 8, 9, 16, 21])
def test_blocks_hold_eight_tokens(m: int) -> None:
    q = torch.randint(-int16.LARGEST, int16.LARGEST + 1, (m, 32), dtype=torch.int16)
    rows = int16.in_blocks(q)
    assert rows.shape == (int16.rows_of_blocks(m), 32)
    seen = set()
    for token in range(m):
        at = token // 8 * 16 + token % 8
        seen |= {at, at + 8}
        assert torch.equal(256 * rows[at].int() + rows[at + 8].int(), q[token].int())
    assert not rows[[i for i in range(len(rows)) if i not in seen]].any()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 7, 33), (3, 5, 4096)])
def test_sums_are_exact(m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    q = torch.randint(-(2**15), int16.LARGEST + 1, (m, k), generator=generator, dtype=torch.int16)
    w = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    assert torch.equal(int16.sums_ref(q, w), exact_sums(q, w))


def test_sums_of_the_longest_rows_do_not_overflow() -> None:
    for value, weight in ((int16.LARGEST, 127), (-int16.LARGEST, -127), (-(2**15), -128), (-(2**15), 127)):
        q = torch.full((1, K_MAX), value, dtype=torch.int16)
        w = torch.full((2, K_MAX), weight, dtype=torch.int8)
        assert int16.sums_ref(q, w).tolist() == [[K_MAX * value * weight] * 2]


def test_sums_are_rounded_once() -> None:
    """Long sums of one sign: rounding those of the halves before they are combined would give other floats."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(20_000, int16.LARGEST + 1, (8, 4096), generator=generator, dtype=torch.int16)
    w = torch.randint(64, 128, (8, 4096), generator=generator, dtype=torch.int8)
    got = int16.sums_ref(q, w).float()
    for one, exact in zip(got.flatten().tolist(), exact_sums(q, w).flatten().tolist(), strict=True):
        around = [float(np.nextafter(F32(one), F32(to))) for to in (-np.inf, np.inf)]
        assert all(abs(Fraction(one) - exact) <= abs(Fraction(other) - exact) for other in around)
    high, low = (int8.matmul_s8(half, w).float() for half in int16.halves(q))
    assert bool((high * 256 + low != got).any())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_linear(dtype: torch.dtype, activation: str) -> None:
    w, x = layer(33, 130), normal(6, 130, seed=3).to(dtype)
    x[2] = 0
    q, scale = quantized(x)
    sums = exact_sums(q, w["qweight"][:, :130]).numpy()
    for bias in (w["bias"], None):
        got = int16.int16x8_linear_ref(x, w["qweight"], w["scale"], bias, activation)
        want = epilogue_oracle(sums, None, None, scale, w["scale"], bias, activation, None, dtype, None, None)
        assert torch.equal(got, want)
        assert torch.equal(int16.int16x8_linear_ref(x[:0], w["qweight"], w["scale"], bias, activation), got[:0])


def test_a_static_linear() -> None:
    w, x, scale = layer(33, 130), normal(6, 130, seed=3), int16.static_scale(-4.0, 3.0)
    sums = exact_sums(int16.quantize_tensor_ref(x, scale, 130), w["qweight"][:, :130]).numpy()
    for bias in (w["bias"], None):
        got = int16.int16x8_static_linear_ref(x, w["qweight"], w["scale"], bias, scale, "relu")
        args = (sums, None, None, None, w["scale"], bias, "relu", None, torch.float32, None, None)
        assert torch.equal(got, epilogue_oracle(*args))


def test_outliers_cost_little() -> None:
    """Tokens with one value a thousand times as large as the rest: int8 loses the rest, int16 does not."""
    x, weight = normal(20, 256, seed=1), normal(64, 256, seed=2)
    x[:, 5] = 1000
    q, scale = int8.quantize_weight(weight)
    assert padded_k(256) == 256
    exact = x.double() @ int8.dequantize_ref(q, scale).double().t()
    rest = exact - x[:, 5:6].double() * int8.dequantize_ref(q, scale).double()[:, 5]
    for reference, least, most in ((int8.w8a8_linear_ref, 0.0, 5.0), (int16.int16x8_linear_ref, 40.0, 80.0)):
        noise = (reference(x, q, scale, None, "none").double() - exact).square().sum()
        decibels = float(10 * torch.log10(rest.square().sum() / noise))
        assert least - 5 <= decibels <= most, decibels
