"""quantize_per_token, quantize_per_tensor, dequantize and colsum on CUDA: every bit is the CPU reference's."""

from __future__ import annotations

import pytest
import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.numerics import int8 as numerics
from qcut.schemes import padded_k
from tests.gpu.support.oracles import DEVICE, activations, assert_same, full_range, name, relayout

OPS = torch.ops.qcut
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("shape", [(1, 1), (7, 37), (129, 1280), (33, 5120), (5, 20000)], ids=name)
def test_quantize_per_token(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = activations(*shape, dtype)
    for k_padded in (padded_k(shape[1]), shape[1] + 33):
        got = OPS.quantize_per_token(x.to(DEVICE), k_padded)
        for g, e in zip(got, numerics.quantize_per_token_ref(x, k_padded), strict=True):
            assert_same(g.cpu(), e)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_token_becomes_nan_and_no_other(bad: float) -> None:
    x = activations(9, 1000, torch.float16)
    x[6, 999] = bad
    q, scale = (t.cpu() for t in OPS.quantize_per_token(x.to(DEVICE), 1008))
    expected = numerics.quantize_per_token_ref(x, 1008)
    assert_same(q, expected[0])
    assert_same(scale, expected[1])
    assert scale.isnan().tolist() == [i == 6 for i in range(9)]


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize(("scale", "zero_point"), [(0.037, -11), (0.037, 127), (1e-6, 0), (3.0e4, -128)])
def test_quantize_per_tensor(dtype: torch.dtype, scale: float, zero_point: int) -> None:
    x = activations(33, 1283, dtype)
    x[5, 0], x[6, 1], x[7, 2] = float("nan"), float("inf"), float("-inf")
    got = OPS.quantize_per_tensor(x.to(DEVICE), scale, zero_point, 1296).cpu()
    assert_same(got, numerics.quantize_per_tensor_ref(x, scale, zero_point, 1296))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_ties_round_to_even(dtype: torch.dtype) -> None:
    x = torch.cat([torch.arange(-127, 127) + 0.5, torch.tensor([127.0])]).to(dtype)[None]
    q, _ = OPS.quantize_per_token(x.to(DEVICE), 256)
    assert_same(q.cpu(), numerics.quantize_per_token_ref(x, 256)[0])
    assert q[0, 127:131].tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("layout", ["row_stride", "column_stride", "transposed", "offset_1", "offset_16"])
def test_quantize_reads_any_layout(layout: str) -> None:
    x = activations(33, 272, torch.float16)
    got = OPS.quantize_per_token(relayout(x.to(DEVICE), layout, 6e4), 272)
    for g, e in zip(got, numerics.quantize_per_token_ref(x, 272), strict=True):
        assert_same(g.cpu(), e)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_dequantize(dtype: torch.dtype) -> None:
    q, scale = full_range(33, 1281), torch.rand(33) + 1e-3
    assert_same(OPS.dequantize(q.to(DEVICE), scale.to(DEVICE), dtype).cpu(), numerics.dequantize_ref(q, scale, dtype))


@pytest.mark.parametrize("shape", [(1, 1), (33, 1283), (5, 131_056)], ids=name)
def test_colsum(shape: tuple[int, int]) -> None:
    q = full_range(*shape)
    q[0] = -128
    assert_same(OPS.colsum(q.to(DEVICE)).cpu(), q.sum(1, dtype=torch.int32))


def test_quantize_no_tokens() -> None:
    q, scale = OPS.quantize_per_token(torch.empty(0, 40, dtype=torch.float16, device=DEVICE), 48)
    assert (q.shape, scale.shape) == ((0, 48), (0,))
    assert OPS.quantize_per_tensor(torch.empty(2, 0, 40, device=DEVICE), 0.1, 0, 48).shape == (0, 48)
