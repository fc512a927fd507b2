"""Values that are refused are found, with their place; others cost no memory."""

from __future__ import annotations

import pytest
import torch

from qcut.numerics.checks import first_difference, out_of_range, same_values

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_are_not_finite(dtype: torch.dtype) -> None:
    t = torch.ones(3, 70, dtype=torch.float32)
    assert out_of_range(t.to(dtype)) is None
    t[1, 69] = torch.nan
    assert out_of_range(t.to(dtype)) == "nan at [1, 69]"
    if dtype is not torch.float8_e4m3fn:  # which has no infinities
        t[1, 69] = -torch.inf
        assert out_of_range(t.to(dtype)) == "-inf at [1, 69]"


def test_ranges() -> None:
    t = torch.tensor([[0, 5], [-3, 2]])
    assert out_of_range(t, -3, 5) is None
    assert out_of_range(t, -2, 5) == "-3 at [1, 0]"
    assert out_of_range(t, -3, 4) == "5 at [0, 1]"
    assert out_of_range(t, -3, above=True) == "-3 at [1, 0]"
    assert out_of_range(torch.tensor([True])) is None
    assert out_of_range(torch.empty(0, 3), 1) is None
    assert out_of_range(torch.tensor(float("nan"))) == "nan at []"
    assert out_of_range(torch.tensor([1 + 2j, complex(0, float("inf"))])) == "inf at [1, 1]"


def test_differences() -> None:
    a = torch.arange(6).view(2, 3)
    b = a.clone()
    assert first_difference(a, b) is None
    b[1, 1] = 9
    assert first_difference(a, b) == "4 at [1, 1], 9 is needed"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32])
def test_tensors_of_the_same_values(dtype: torch.dtype) -> None:
    a = torch.arange(6).view(2, 3).to(dtype)
    b = a.clone()
    assert same_values(a, b)
    assert not same_values(a, b.view(3, 2))
    assert not same_values(a, b.to(torch.int16))
    b[1, 2] = 7
    assert not same_values(a, b)
