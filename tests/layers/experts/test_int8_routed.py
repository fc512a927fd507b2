"""`Linear.routed` of layers with int8 weights: each route is what the layer of its expert makes of its token."""

from __future__ import annotations

import pytest
import torch

from qcut.layers.tokens import Int8Tokens
from qcut.numerics.gating import GatedSilu
from tests.layers.experts.stacks import stack_of
from tests.support.oracles import FLOATS, normal
from tests.support.routes import in_tiles, random_experts, tiles_of

E, N, K = 5, 33, 70
SIZES = (1, 8, 16, 32, 128, 256)
"""Routes of a tile."""


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "dtype", "size"),
    [
        *(("w8a8", dtype, size) for dtype in FLOATS for size in SIZES),
        *(("w8a16", torch.float16, size) for size in SIZES),
        *(("int16x8", dtype, size) for dtype in FLOATS for size in SIZES[:2]),
        *(("w8a8_rotated_g32", dtype, size) for dtype in FLOATS for size in SIZES),
    ],
)
def test_routes_are_those_of_single_layers(scheme: str, dtype: torch.dtype, size: int) -> None:
    k = 96 if "rotated" in scheme else K
    for bias in (True, False):
        stack = stack_of(scheme, E, N, k, bias)
        for rows, per_row in ((1, 2), (40, 3), (24, 1)):
            x, chosen = normal(rows, k, seed=rows).to(dtype), random_experts(rows, per_row, E)
            y = stack.routed(x, tiles_of(chosen, E, size), per_row)
            assert y is not None
            assert (y.dtype, y.shape) == (dtype, (rows * per_row, N))
            for route in in_tiles(chosen, E).nonzero()[:, 0].tolist():
                want = stack.expert(int(chosen.flatten()[route]))(x[route // per_row][None])[0]
                if scheme != "w8a16":
                    assert torch.equal(y[route], want)
                else:  # the order of float32 sums may differ with the number of tokens
                    torch.testing.assert_close(y[route], want, rtol=2e-3, atol=1e-3)


@torch.no_grad()
def test_gated_int16_tokens_are_those_of_their_gating() -> None:
    chosen, x = random_experts(9, 2, E), normal(9, 2 * K).half()
    stack, tiles = stack_of("int16x8", E, N, K), tiles_of(chosen, E, 8)
    got = stack.routed(x, tiles, 2, gate=GatedSilu())
    want = stack.routed(torch.ops.qcut.silu_mul(*x.chunk(2, -1), None), tiles, 2)
    assert got is not None
    assert want is not None
    assert torch.equal(got, want)


@torch.no_grad()
def test_activations_and_strides() -> None:
    chosen = random_experts(9, 2, E)
    x = normal(K, 9).t()
    stack = stack_of("w8a8", E, N, K)
    stack.form.activation = "gelu_tanh"
    y = stack.routed(x, tiles_of(chosen, E, 8), 2)
    assert y is not None
    for route in in_tiles(chosen, E).nonzero()[:, 0].tolist():
        assert torch.equal(y[route], stack.expert(int(chosen.flatten()[route]))(x[route // 2][None])[0])


@torch.no_grad()
def test_tokens_may_be_quantized_before() -> None:
    x, tiles = normal(9, K).half(), tiles_of(random_experts(9, 2, E), E, 8)
    prepared = Int8Tokens(*torch.ops.qcut.quantize_per_token(x, 80), x.dtype)
    stack = stack_of("w8a8", E, N, K)
    got, want = stack.routed(prepared, tiles, 2), stack.routed(x, tiles, 2)
    assert got is not None
    assert want is not None
    assert torch.equal(got, want)
    assert stack_of("w8a16", E, N, K).routed(prepared, tiles, 2) is None


@torch.no_grad()
def test_shorter_last_group_takes_small_tiles() -> None:
    stack, chosen = stack_of("w8a8_rotated", E, N, 192), random_experts(40, 2, E)
    x = normal(40, 192).half()
    few = tiles_of(chosen, E, stack.form.largest_tile)
    y = stack.routed(x, few, 2)
    assert y is not None
    for route in in_tiles(chosen, E).nonzero()[:, 0].tolist():
        assert torch.equal(y[route], stack.expert(int(chosen.flatten()[route]))(x[route // 2][None])[0])
    assert stack.routed(x, tiles_of(chosen, E, 128), 2) is None


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("w8a16", torch.float32),
        *((scheme, torch.float16) for scheme in ("w8a8_static", "int16x8_static", "fp8_dynamic", "fp8_static")),
    ],
)
def test_other_layers_have_no_kernel_of_experts(scheme: str, dtype: torch.dtype) -> None:
    chosen = random_experts(9, 2, E)
    assert stack_of(scheme, E, N, K).routed(normal(9, K).to(dtype), tiles_of(chosen, E, 8), 2) is None
