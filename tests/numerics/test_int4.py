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
    y = int4.rotate(x)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close((y * int4.rotate(other)).sum(1), (x * other).sum(1), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(int4.rotate_back(y), x, atol=1e-5, rtol=1e-5)
    matrix = int4.rotate(torch.eye(d)).double() * math.sqrt(d)
    torch.testing.assert_close(matrix.abs(), torch.ones(d, d).double(), atol=1e-5, rtol=0)
    # An outlier is spread evenly.
    one = torch.zeros(1, d)
    one[0, 5] = 100
    torch.testing.assert_close(int4.rotate(one).abs(), torch.full((1, d), 100 / math.sqrt(d)))


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


def test_large_rows_saturate_and_nan_rows_are_nan() -> None:
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


# ── guides ───────────────────────────────────────────────────────────────────────────────────────


def guide_like(d: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Second moments of queries that lie mostly along a few directions, a mean of keys, and their guide."""
    generator = torch.Generator().manual_seed(d)
    main = torch.linalg.qr(torch.randn(heads, d, d, generator=generator).double()).Q
    weights = 2.0 ** torch.arange(5, -d + 5, -1).clamp(min=0).double()
    moments = main @ (weights[:, None] ** 2 * main.transpose(1, 2))
    mean = torch.randn(heads, d, generator=generator)
    return moments, mean, int4.guide_of(moments, mean)


@pytest.mark.parametrize("d", int4.HEADS)
def test_a_guide_lessens_the_error_of_scores(d: int) -> None:
    moments, mean, guide = guide_like(d)
    y = (rows(d, 400).view(200, 2, d) + 2 * mean).flatten(0, 1)
    guide[:, :d, 2] = (2 * mean).view(torch.int32)

    def errors(guided: torch.Tensor | None) -> tuple[float, float]:
        got = int4.dequantize_rows_ref(*int4.quantize_rows_ref(y, guided)).view(200, 2, d).double()
        e = got + (0 if guided is None else 2 * mean) - y.view(200, 2, d)
        return float(torch.einsum("rhd,hdk,rhk->", e, moments, e)), float(e.square().sum())

    centred = guide.clone()
    centred[:, :d, :2] = centred[:, d:] = 0
    (nearest, _), (mean_alone, least), (moved, squares) = errors(None), errors(centred), errors(guide)
    assert mean_alone < 0.8 * nearest  # the range is smaller
    assert moved < 0.7 * mean_alone  # errors cancel
    assert least < squares < 1.8 * least  # and cost a little elsewhere


def test_moves_are_the_definition() -> None:
    """Column by column in Python's integers."""
    d = 32
    _, _, guide = guide_like(d)
    y = rows(d, 40) * 2 + 1
    codes, words = int4.quantize_rows_ref(y, guide)
    lone = guide.clone()
    lone[:, :d, :2] = lone[:, d:] = 0
    nearest, same = int4.quantize_rows_ref(y, lone)
    assert torch.equal(words, same)
    assert not torch.equal(codes, nearest)
    fields = int4._fields(guide)
    for r, (row, word, before, after) in enumerate(zip(y, words, nearest, codes, strict=True)):
        u, cost, h = fields.directions[r % 2].tolist(), fields.costs[r % 2].tolist(), fields.strengths[r % 2]
        c = [int(v) for pair in before.tolist() for v in (pair & 15, pair >> 4)]
        scale = (word.int() >> 1 & 0x7FF0).to(torch.int16).view(torch.float16).float()
        t = (row - fields.mean[r % 2]) * (1 / scale) + (5.5 + (int(word) & 31) / 8)
        e = [round(float(1024 * (v - x).clamp(-2, 2))) for v, x in zip(t, c, strict=True)]
        for _ in range(int4.MOVES):
            p = torch.tensor([sum(e[i] * u[i][k] for i in range(d)) for k in range(8)]).float()
            q = [max(-32767, min(32767, round(float(v)))) for v in p * h]
            g = [8 * e[i] + sum(u[i][k] * q[k] for k in range(8)) for i in range(d)]
            signs = [1 if v >= 0 else -1 for v in g]
            most = 2**22 - 1
            gains = [min(2 * abs(v) - cost[i], most) if 0 <= c[i] + signs[i] <= 15 else 0 for i, v in enumerate(g)]
            best = max(range(d), key=lambda i: (gains[i], -i))
            if gains[best] <= 0:
                break
            c[best] += signs[best]
            e[best] -= 1024 * signs[best]
        assert c == [v for pair in after.tolist() for v in (pair & 15, pair >> 4)], r


def test_a_guide_of_nothing_is_none() -> None:
    y = rows(64, 50)
    y[3, 7], y[4, 1] = math.nan, math.inf
    for moments in (torch.eye(64).expand(2, 64, 64), torch.full((2, 64, 64), math.nan), torch.zeros(2, 64, 64)):
        guide = int4.guide_of(moments, torch.full((2, 64), math.inf))
        assert guide.shape == (2, 66, 4)
        for got, want in zip(int4.quantize_rows_ref(y, guide), int4.quantize_rows_ref(y), strict=True):
            assert torch.equal(got, want)
