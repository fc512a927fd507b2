"""The operator of layers in integers on the CPU: agreement with the definition, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import DtypeError, QuantizationError, ShapeError
from qcut.numerics import integers
from tests.support.operands import case

OP = torch.ops.qcut.integer_linear


def arguments(dtype: torch.dtype, m: int = 6, n: int = 7, k: int = 21) -> tuple[Any, ...]:
    zero = torch.tensor([5], dtype=torch.int32) if dtype is torch.int8 else None
    return *case(dtype, m, n, k), zero, True


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_leading_dimensions(dtype: torch.dtype) -> None:
    q, *rest = arguments(dtype)
    want = integers.integer_linear_ref(q, *rest)
    assert torch.equal(OP(q, *rest), want)
    assert torch.equal(OP(q.view(2, 3, 21), *rest), want.view(2, 3, 7))
    assert torch.equal(OP(q[1], *rest), want[1])


def replaced(at: int, value: Any, dtype: torch.dtype = torch.int8) -> tuple[Any, ...]:
    args = list(arguments(dtype))
    args[at] = value(args[at]) if callable(value) else value
    return tuple(args)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (replaced(0, lambda q: q.float()), DtypeError, "q is float32; allowed: int8, int16"),
        (replaced(0, lambda q: q[:, :3]), ShapeError, r"\[N, 16\]"),
        (replaced(0, torch.zeros((), dtype=torch.int8)), ShapeError, "q has shape"),
        (replaced(1, lambda w: w.short()), DtypeError, "qweight is int16"),
        (replaced(2, lambda b: b.int()), DtypeError, "bias is int32; allowed: int64"),
        (replaced(2, lambda b: b[1:]), ShapeError, "bias"),
        (replaced(3, lambda b: b.long()), DtypeError, "multiplier"),
        (replaced(4, lambda b: b[None]), ShapeError, "shift"),
        (replaced(5, None), ShapeError, "zero_point of int8 tokens: found none; allowed: one"),
        (replaced(5, torch.zeros(1), torch.int16), ShapeError, "zero_point of int16 tokens: found one; allowed: none"),
        (replaced(2, lambda b: b + 2**39), QuantizationError, r"bias: found \d+ at \[0\]; -274877906943 to"),
        (replaced(3, lambda b: b + 2**24), QuantizationError, "multiplier: found"),
        (replaced(4, lambda b: b + 63), QuantizationError, "shift: found"),
        (replaced(5, lambda b: b + 127), QuantizationError, "zero_point: found 132 at"),
        (replaced(0, lambda q: q * 0 + 32_640, torch.int16), QuantizationError, "32640 at .* -32768 to 32639"),
    ],
)
def test_refusals(args: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        OP(*args)


def test_a_row_of_more_columns_is_refused() -> None:
    k = integers.K_MAX + 1
    weight = torch.zeros(1, k + 15, dtype=torch.int8)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(QuantizationError, match="K is 65537; allowed: 1 to 65536"):
        OP(torch.zeros(1, k, dtype=torch.int16), weight, one.long(), one, one, None)
