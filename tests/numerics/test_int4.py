"""Rows of 4 bits: turned and turned back, near what they were given, exact where that is promised."""

from __future__ import annotations

import math

import pytest
import torch

from qcut.errors import ConfigError
from qcut.numerics import int4


def rows(d: int, count: int = 200) -> torch.Tensor:
    return torch.randn(count, d, generator=torch.Generator().manual_seed(d))


@pytest.mark.parametrize("d", int4.HEADS)
def test_turning_is_a_rotation(d: int) -> None:
    x, other = rows(d).unsqueeze(0).repeat(2, 1, 1) + torch.tensor([0.0, 1.0])[:, None, None]
    y = int4.turn(x)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close((y * int4.turn(other)).sum(1), (x * other).sum(1), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(int4.turn_back(y), x, atol=1e-5, rtol=1e-5)
    matrix = int4.turn(torch.eye(d)).double() * math.sqrt(d)
    torch.testing.assert_close(matrix.abs(), torch.ones(d, d).double(), atol=1e-5, rtol=0)
    # An outlier is spread evenly.
    one = torch.zeros(1, d)
    one[0, 5] = 100
    torch.testing.assert_close(int4.turn(one).abs(), torch.full((1, d), 100 / math.sqrt(d)))


@pytest.mark.parametrize("d", int4.HEADS)
def test_normal_rows_lose_a_hundredth(d: int) -> None:
    y = rows(d, 2000)
    codes, words = int4.quantize_rows_ref(y)
    assert codes.shape == (2000, d // 2)
    assert (codes.dtype, words.dtype) == (torch.uint8, torch.int16)
    got = int4.dequantize_rows_ref(codes, words)
    loss = float((got - y).square().mean())
    assert loss < {32: 0.0062, 64: 0.0078, 128: 0.0093, 256: 0.0106}[d]


def spelled(y: list[float]) -> tuple[list[int], float, float]:
    """The definition, element by element in Python's floats, which the chosen rows lose nothing by."""
    lo, hi = min(y), max(y)
    span, best = max(hi - lo, 1.6 * max(hi, -lo)), (math.inf, [], 0.0, 0.0)
    for shrink in int4.SHRINKS:
        half = torch.tensor(span * shrink / 15).half()
        scale = float(((half.view(torch.int16) + 8) & -16).view(torch.float16))
        z = min(max(round((2 - (hi + lo) / 2 / scale) * 8), 0), 31)
        middle = 5.5 + z / 8
        codes = [min(max(round(v / scale + middle), 0), 15) for v in y]
        loss = sum((scale * (c - middle) - v) ** 2 for c, v in zip(codes, y, strict=True))
        if loss < best[0]:
            best = (loss, codes, scale, middle)
    return best[1:]  # type: ignore[return-value]


def test_rows_are_the_definition() -> None:
    y = rows(32, 40) * 3 + 1
    got = int4.dequantize_rows_ref(*int4.quantize_rows_ref(y))
    same = 0
    for row, mine in zip(y, got, strict=True):
        codes, scale, middle = spelled([float(v) for v in row])
        want = torch.tensor([scale * (c - middle) for c in codes])
        same += torch.equal(want, mine)
        torch.testing.assert_close((mine - row).square().sum(), (want - row).square().sum(), rtol=1e-2, atol=0)
    assert same >= 38  # a loss that another f ties with may be rounded either way


def test_every_word_is_read_as_it_is_written() -> None:
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    codes = torch.tensor([[0x10, 0xF8]], dtype=torch.uint8).expand(len(words), 2)
    got = int4.dequantize_rows_ref(codes, words).double()
    wide = words.int() & 0xFFFF
    exponent, fraction, z = wide >> 11, wide >> 5 & 63, wide & 31
    scale = torch.where(exponent > 0, (1 + fraction / 64) * 2.0 ** (exponent - 15.0), fraction / 64 * 2.0**-14).double()
    want = scale[:, None] * (torch.tensor([0, 1, 8, 15]) - (5.5 + z[:, None] / 8)).double()
    finite = exponent < 31
    assert torch.equal(got[finite], want[finite])
    assert not got[~finite].isfinite().any()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 3.0, -40.0])
def test_constant_and_far_rows_fit_the_levels(scale: float, offset: float) -> None:
    y = (rows(64) + offset) * scale
    got = int4.dequantize_rows_ref(*int4.quantize_rows_ref(y))
    largest = y.abs().amax(1, keepdim=True)
    assert ((got - y).abs() <= largest * 0.13).all()
    flat = torch.full((7, 64), offset * scale)
    assert ((int4.dequantize_rows_ref(*int4.quantize_rows_ref(flat)) - flat).abs() <= abs(offset * scale) * 0.06).all()


def test_rows_beyond_the_scales_saturate_and_bad_ones_are_nan() -> None:
    y = rows(64, 4)
    y[0] *= 1e30
    y[1, 3], y[2, 4] = math.nan, math.inf
    codes, words = int4.quantize_rows_ref(y)
    got = int4.dequantize_rows_ref(codes, words)
    assert got[0].isfinite().all()
    assert (got[0].sign() == y[0].sign()).all()
    assert got[1:3].isnan().all()
    assert not codes[1:3].any()
    assert torch.equal(got[3:], int4.dequantize_rows_ref(*int4.quantize_rows_ref(y[3:])))


def test_other_heads_are_refused() -> None:
    for d in (8, 48, 80, 512):
        with pytest.raises(ConfigError, match=f"heads of {d} columns; allowed: 32, 64, 128, 256"):
            int4.check_head(d)
