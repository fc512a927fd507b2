"""`qcut.gemm_s8` on the CPU: every layout against int64, fakes and compilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qcut
from qcut.ops.gemm import OUT_DTYPES
from tests.support.operands import LAYOUTS, OUT_LAYOUT, SHAPES, operands
from tests.support.oracles import epilogue_oracle, s8


def sums(a: Tensor, b: Tensor) -> np.ndarray:
    return a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T


# ── values and strides ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_every_layout_against_int64(layouts: str) -> None:
    out_layout = OUT_LAYOUT[layouts[2]]
    for shape in SHAPES:
        a, b = operands(layouts, *shape, ld=53, offset=3)
        exact = sums(a, b)
        summed = qcut.gemm_s8(a, b, out_dtype=torch.int32, out_layout=out_layout)
        assert np.array_equal(summed.numpy(), exact), shape
        wrapped = qcut.gemm_s8(a, b, out_dtype=torch.int8, wrap=True, out_layout=out_layout)
        assert np.array_equal(wrapped.numpy(), exact.astype(np.uint8).view(np.int8)), shape
        scale = float(np.float32(40 / (5461 * shape[2] ** 0.5)))
        scaled = qcut.gemm_s8(a, b, out_dtype=torch.int8, out_inv_scale=scale, out_zero_point=-2, out_layout=out_layout)
        expected = epilogue_oracle(exact, None, None, None, None, None, "none", None, torch.int8, scale, -2)
        assert torch.equal(scaled, expected), shape


@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("m", [0, 1, 6])
def test_strides_of_the_result(m: int, dtype: torch.dtype) -> None:
    a, b = s8(m, 9), s8(4, 9)
    assert qcut.gemm_s8(a, b, out_dtype=dtype).stride() == (4, 1)
    column = qcut.gemm_s8(a, b, out_dtype=dtype, out_layout="column")
    assert column.dtype is dtype
    assert column.shape == (m, 4)
    assert column.stride() == (1, max(m, 1))
    assert torch.equal(column, qcut.gemm_s8(a, b, out_dtype=dtype))


def test_everything_fused_into_a_column_major_result() -> None:
    a, b = operands("nt", 6, 10, 33)
    options = {
        "zero_point": torch.arange(-3, 3, dtype=torch.int32),
        "colsum": b.sum(1, dtype=torch.int32),
        "row_scale": torch.rand(6),
        "col_scale": torch.rand(10) * 1e-3,
        "bias": torch.randn(10),
        "activation": "relu",
        "residual": torch.randn(6, 10),
        "out_dtype": torch.float32,
    }
    assert torch.equal(qcut.gemm_s8(a, b, **options, out_layout="column"), qcut.gemm_s8(a, b, **options))


def test_without_tensor_cores_the_cpu_computes_the_same() -> None:
    a, b = s8(3, 40), s8(5, 40)
    assert torch.equal(qcut.gemm_s8(a, b, tensor_cores=False), qcut.gemm_s8(a, b))


@pytest.mark.parametrize(
    "options",
    [
        {"out_layout": "column"},
        {"out_dtype": torch.int32, "out_layout": "column"},
        {"out_dtype": torch.int8, "wrap": True, "tensor_cores": False},
    ],
    ids=str,
)
def test_opcheck(options: dict[str, Any]) -> None:
    for m in (0, 1, 5):
        a, b = operands("nt", m, 7, 32)
        torch.library.opcheck(torch.ops.qcut.gemm_s8.default, (a, b), options)


@torch.no_grad()
def test_compiles_with_a_column_major_result() -> None:
    def call(a: Tensor, b: Tensor) -> Tensor:
        return qcut.gemm_s8(a, b, out_layout="column") * 2

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 2, 33):
        a, b = operands("nn", m, 7, 20)
        assert torch.equal(compiled(a, b), call(a, b))
