"""Rescaling and layers in integers: Python's integers are the oracle, at the ends of every range."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import torch

from qcut.numerics import int8, int16, integers
from qcut.numerics.integers import BIAS_MAX, K_MAX, MULTIPLIER_MAX, SHIFT_MAX
from tests.support.operands import case

V_MAX = 2**39 - 1


def rounded(v: int, multiplier: int, shift: int) -> int:
    return round(Fraction(v * multiplier, 2**shift))  # halves to even


def test_rescaling_equals_fractions() -> None:
    draw = random.Random(0)
    values = [
        0,
        1,
        -1,
        2,
        3,
        -3,
        V_MAX,
        -V_MAX,
        *(draw.randrange(-V_MAX, V_MAX + 1) >> draw.randrange(39) for _ in range(60)),
    ]
    multipliers = [0, 1, 2**23, MULTIPLIER_MAX, 3, *(draw.randrange(MULTIPLIER_MAX + 1) for _ in range(6))]
    for multiplier in multipliers:
        shifts = list(range(SHIFT_MAX + 1))
        v = torch.tensor(values)[:, None].expand(-1, len(shifts))
        shift = torch.tensor(shifts, dtype=torch.int32)
        got = integers.rescale_ref(v, torch.full_like(shift, multiplier), shift)
        assert got.tolist() == [[rounded(value, multiplier, s) for s in shifts] for value in values]


def test_halves_go_to_the_even_integer() -> None:
    v = torch.tensor([[-5], [-3], [-1], [1], [3], [5], [7]])
    one = torch.ones(1, dtype=torch.int32)
    assert integers.rescale_ref(v, one, one).flatten().tolist() == [-2, -2, 0, 0, 2, 2, 4]
    assert integers.rescale_ref(v, one, 0 * one).tolist() == v.tolist()


def test_no_step_leaves_64_bits() -> None:
    assert 2**15 * 2**7 * K_MAX + BIAS_MAX <= V_MAX
    assert V_MAX * MULTIPLIER_MAX < 2**63
    assert 2 * (2**SHIFT_MAX - 1) < 2**63


def test_a_ratio_has_24_bits() -> None:
    draw = random.Random(1)
    ratios = [
        1.0,
        0.5,
        2.0**24 - 1,
        1 - 2.0**-53,
        2.0**-38 * 1.9,
        *(math.exp(draw.uniform(-26, 16)) for _ in range(200)),
    ]
    multiplier, shift = integers.fixed_point(torch.tensor(ratios, dtype=torch.float64))
    for ratio, m, s in zip(ratios, multiplier.tolist(), shift.tolist(), strict=True):
        assert 2**23 <= m <= MULTIPLIER_MAX
        assert 0 <= s <= SHIFT_MAX
        assert abs(Fraction(m, 2**s) - Fraction(ratio)) <= Fraction(ratio) / 2**24


def test_small_ratios_keep_the_longest_shift() -> None:
    ratios = torch.tensor([0.0, 2.0**-63 * 0.99, 2.0**-62, 2.0**-50 * 1.3, 1e-300], dtype=torch.float64)
    multiplier, shift = integers.fixed_point(ratios)
    assert multiplier.tolist() == [0, 0, 1, round(2**12 * 1.3), 0]
    assert shift.tolist()[1:] == [62] * 4
    # What such a multiplier leaves out of the largest value is less than half a step.
    assert V_MAX * 2.0**-63 < 0.5
    assert integers.ratio_problem(torch.tensor([1.0, 2.0**24])) is not None
    assert integers.ratio_problem(torch.tensor([float("nan")])) is not None
    assert integers.ratio_problem(ratios) is None


def test_layers_equal_python_integers() -> None:
    for dtype in (torch.int8, torch.int16):
        least, most = integers.LIMITS[dtype]
        for k, relu in ((1, False), (37, True), (64, False)):
            q, weight, bias, multiplier, shift = case(dtype, 5, 7, k, k)
            zero = torch.tensor([-17], dtype=torch.int32) if dtype is torch.int8 else None
            got = integers.integer_linear_ref(q, weight, bias, multiplier, shift, zero, relu)
            z = 0 if zero is None else int(zero)
            for i, row in enumerate(q.tolist()):
                for j in range(7):
                    acc = sum(a * b for a, b in zip(row, weight[j].tolist(), strict=False)) + int(bias[j])
                    want = rounded(acc, int(multiplier[j]), int(shift[j])) + z
                    assert int(got[i, j]) == max(z if relu else least, min(most, max(want, least)))
            assert got.dtype is dtype


def test_the_longest_sums() -> None:
    for dtype, value in ((torch.int16, -(2**15)), (torch.int16, int16.LARGEST), (torch.int8, -128)):
        q = torch.full((2, K_MAX), value, dtype=dtype)
        weight = torch.full((2, K_MAX), -128, dtype=torch.int8)
        weight[1] = 127
        for sign in (1, -1):
            bias = torch.full((2,), sign * BIAS_MAX)
            multiplier = torch.full((2,), MULTIPLIER_MAX, dtype=torch.int32)
            shift = torch.tensor([48, 50], dtype=torch.int32)
            zero = torch.zeros(1, dtype=torch.int32) if dtype is torch.int8 else None
            got = integers.integer_linear_ref(q, weight, bias, multiplier, shift, zero, False)
            least, most = integers.LIMITS[dtype]
            for j, w in enumerate((-128, 127)):
                want = rounded(value * w * K_MAX + sign * BIAS_MAX, MULTIPLIER_MAX, int(shift[j]))
                assert got[:, j].tolist() == [max(least, min(most, want))] * 2


def test_a_zero_point_is_taken_off_the_bias() -> None:
    q, weight, *_ = case(torch.int8, 4, 6, 48)
    colsum = int8.colsum_ref(weight)
    scale, weight_scale = 0.25, torch.rand(6) + 0.5
    bias = torch.randn(6)
    got = integers.bias_at_sums(bias, scale, weight_scale, -9, colsum)
    exact = (q.long() + 9) @ weight.long().t()
    assert torch.equal(
        integers.sums_ref(q, weight) + got - (bias.double() / (weight_scale.double() * scale)).round(), exact
    )
    assert torch.equal(integers.bias_at_sums(None, scale, weight_scale, -9, colsum), 9 * colsum.long())


def test_what_leaves_the_range_is_found() -> None:
    _, _, bias, multiplier, shift = case(torch.int8, 1, 3, 4)
    assert integers.state_problem(bias, multiplier, shift) is None
    ends = torch.tensor([BIAS_MAX, -BIAS_MAX, 0])
    assert integers.state_problem(ends, 0 * multiplier + MULTIPLIER_MAX, 0 * shift + SHIFT_MAX) is None
    for name, state in (
        ("bias", (ends + 1, multiplier, shift)),
        ("multiplier", (bias, multiplier + 2**24, shift)),
        ("multiplier", (bias, 0 * multiplier - 1, shift)),
        ("shift", (bias, multiplier, 0 * shift + 63)),
        ("shift", (bias, multiplier, 0 * shift - 1)),
    ):
        found = integers.state_problem(*state)
        assert found is not None
        assert found[0] == name
    huge = integers.bias_at_sums(
        torch.tensor([1.0, -1.0, 0.5]), 1e-6, torch.full((3,), 1e-7), 0, torch.zeros(3, dtype=torch.int32)
    )
    assert integers.state_problem(huge, multiplier, shift) is not None
