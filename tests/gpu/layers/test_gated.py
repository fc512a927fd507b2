"""Layers that multiply gate and up in their product, on CUDA: bitwise the product, and then `silu_mul`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcut.cuda.plans import forget_plans, watched_loads
from qcut.layers.base import Linear
from tests.gpu.layers.test_shifted import made
from tests.gpu.support.oracles import DEVICE, assert_same, name

HALF, BRAIN = torch.float16, torch.bfloat16
SCHEMES = ("codebook4", "codebook4_int8", "w8a8", "w8a16")
ROWS = (1, 2, 8)
LARGE, RAGGED, SMALL, LONG = (14352, 4096), (2224, 1024), (48, 320), (2224, 8192)
"""(rows of the gate, K). LARGE and RAGGED leave their last CTA fewer rows; the warps of LONG have a second round."""


def layer_of(scheme: str, size: tuple[int, int], *, bias: bool = True) -> Any:
    half, k = size
    torch.manual_seed(half)
    return Linear.from_float(nn.Linear(k, 2 * half, bias=bias, device=DEVICE), scheme)


def tokens(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of three magnitudes, and one of zeros."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * (1 + torch.arange(m) % 3 * 8)[:, None]
    x[4:5] = 0
    return x.to(DEVICE, dtype)


def together(layer: Any, x: Tensor) -> list[Tensor]:
    """The result, and of int8 tokens the largest magnitudes that its product notes."""
    if layer.scheme.name != "w8a8":
        return [layer.forward_gated(x)]
    absmax = torch.zeros(len(x), device=DEVICE)
    q = torch.ops.qcut.quantize_per_token(x, layer.qweight.shape[1])
    return [layer.forward_int8(*q, x.dtype, absmax, gated=True), absmax]


def apart(layer: Any, x: Tensor) -> list[Tensor]:
    if layer.scheme.name != "w8a8":
        return [torch.ops.qcut.silu_mul(*layer(x).chunk(2, 1))]
    absmax = torch.zeros(len(x), device=DEVICE)
    q = torch.ops.qcut.quantize_per_token(x, layer.qweight.shape[1])
    return [torch.ops.qcut.silu_mul(*layer.forward_int8(*q, x.dtype).chunk(2, 1), absmax), absmax]


def check(layer: Any, dtype: torch.dtype = HALF, *, fused: int) -> None:
    """``fused``: plans whose kernels multiply gate and up, one for each bucket of rows."""
    inputs = [tokens(m, layer.in_features, dtype) for m in ROWS]
    want = [apart(layer, x) for x in inputs]
    forget_plans()
    with watched_loads() as loaded:
        for _ in range(2):
            for x, expected in zip(inputs, want, strict=True):
                for got, one in zip(together(layer, x), expected, strict=True):
                    assert_same(got, one)
    assert sum("_gated_" in kernel for kernel in loaded) == fused, loaded


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "scheme"),
    [*((size, scheme) for size in (LARGE, RAGGED, SMALL) for scheme in SCHEMES), (LONG, "w8a8"), (LONG, "w8a16")],
    ids=name,
)
def test_results_are_those_of_two_kernels(size: tuple[int, int], scheme: str) -> None:
    check(layer_of(scheme, size), fused=2)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_types_and_no_bias(scheme: str) -> None:
    check(layer_of(scheme, RAGGED, bias=False), BRAIN, fused=2)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["codebook4_pairs", "codebook3_g64", "codebook4+4", "codebook4_rows_int8"])
def test_other_codebooks(scheme: str) -> None:
    check(layer_of(scheme, RAGGED), fused=2)


@torch.no_grad()
def test_offsets_and_columns_in_an_order_of_their_own() -> None:
    check(made(2 * 1376, 1024, 128, ordered=True).to(DEVICE), fused=2)


@torch.no_grad()
def test_float32_results() -> None:
    check(layer_of("w8a8", RAGGED), torch.float32, fused=2)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_tiles_take_two_kernels(scheme: str) -> None:
    check(layer_of(scheme, (40, 320)), fused=0)
