"""Stacked projections on the GPU: bitwise the separate ones where products are of integers, near them elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcut.layers.linear import Linear
from qcut.layers.stacking import Stacker
from qcut.ops.paths import execution_path
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same

HALF, BRAIN = torch.float16, torch.bfloat16
EXACT = ("w8a8", "w8a8_rotated", "codebook4_int8", "codebook3_g64_int8", "codebook4+4_int8", "int4_g32_int8")
FLOAT = (None, "w8a16", "codebook4", "codebook2_g64", "codebook4+4", "codebook4+2", "codebook4_g32_qr", "int4")
LIMIT = {HALF: 2.0**-10, BRAIN: 2.0**-7}
"""Of the error of either product, relative: one rounding of each weight and one of the output, in the tokens' type."""
K, ROWS = 320, (192, 64, 72)


def siblings_of(scheme: str | None, dtype: torch.dtype = HALF, *, bias: bool = True) -> Any:
    """With a zero row and an outlier each; the last of them fills no block."""
    torch.manual_seed(3)
    modules: list[nn.Module] = []
    for n in ROWS:
        linear = nn.Linear(K, n, bias=bias)
        with torch.no_grad():
            linear.weight[0] = 0
            linear.weight[n // 2, K // 2] = 9.0
        modules.append(linear.to(dtype) if scheme is None else Linear.from_float(linear, scheme))
    return nn.ModuleList(modules).to(DEVICE).eval()


def stack(modules: Any) -> Any:
    made = Stacker(modules).stack(list(modules))
    assert made is not None
    return made


def tokens(m: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)


def results(modules: Any, x: Tensor) -> Tensor:
    return torch.cat([module(x) for module in modules], -1)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("scheme", EXACT)
def test_integer_products_are_the_separate_ones(scheme: str, dtype: torch.dtype, bias: bool) -> None:
    modules = siblings_of(scheme, bias=bias)
    inputs = [tokens(m, dtype) for m in (1, 2, 9, 130)]
    want = [results(modules, x) for x in inputs]
    stacked = stack(modules)
    for x, expected in zip(inputs, want, strict=True):
        assert_same(stacked(x), expected)
        assert_same(results(modules, x), expected)
        with execution_path("reference"):
            assert_same(stacked(x), expected)
    if scheme == "w8a8":
        rows = torch.ops.qcut.quantize_per_token(inputs[2], K)
        assert_same(stacked.forward_int8(*rows, dtype), want[2])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("scheme", FLOAT)
def test_float_products_are_near_the_separate_ones(scheme: str | None, dtype: torch.dtype) -> None:
    modules = siblings_of(scheme, dtype)
    inputs = [tokens(m, dtype) for m in (1, 2, 9, 130)]
    want = [results(modules, x) for x in inputs]
    stacked = stack(modules)
    for x, expected in zip(inputs, want, strict=True):
        got = stacked(x)
        assert got.dtype is dtype
        assert_same(stacked(x), got)
        assert (got.double() - expected.double()).norm() <= 2 * LIMIT[dtype] * expected.double().norm()
        if scheme is not None:  # cuBLAS may choose by where a bias lies; kernels of qcut do not
            assert_same(results(modules, x), expected)


@torch.no_grad()
def test_a_captured_stack_is_the_launched_one() -> None:
    for scheme in ("w8a8", "codebook4"):
        stacked, x = stack(siblings_of(scheme)), tokens(1, HALF)
        want = stacked(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = stacked(x)
        graph.replay()
        assert_same(got, want)


@pytest.mark.parametrize("columns", [256, 72, 13])
@pytest.mark.parametrize("m", [1, 5])
def test_gate_and_up_may_lie_side_by_side(m: int, columns: int) -> None:
    both = torch.randn(m, 2 * columns, device=DEVICE).half()
    gate, up = both.chunk(2, -1)
    assert_same(torch.ops.qcut.silu_mul(gate, up), torch.ops.qcut.silu_mul(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("scheme", [None, "w8a8", "codebook4"])
def test_weights_take_no_more_memory(scheme: str | None) -> None:
    """One set more at a time; 16 KiB are for blocks of 512 bytes, and for what compares codebooks."""
    model = llama(scheme)
    sets = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        sets += [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
    largest = max(sum(t.nbytes for m in one for t in (*m.parameters(), *m.buffers())) for one in sets)
    stacker = Stacker(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = [stacker.stack(one) for one in sets]
    assert None not in made
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.max_memory_allocated() <= before + largest + (1 << 14)
