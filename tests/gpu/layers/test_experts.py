"""Experts on CUDA: each route is bitwise what the layer of its expert computes by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import RangeError, UnsupportedError
from qcut.layers.experts.experts import Experts, weighted_sum
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics.gating import Gating
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

COUNT, H, WIDTH = 6, 256, 192
IN_GRAPHS = ("codebook4", "codebook4_int8", "w8a8", "w8a8_rotated_g64", "w8a16", "int16x8", "fp8", "fp8_blocks")
FLOAT_SUMS = ("codebook4", "codebook3", "codebook4+4", "w8a16", "fp8", "fp8_blocks")
SCHEMES = (
    "w8a8",
    "w8a8_rotated",
    "w8a8_rotated_g64",
    "w8a8_static",
    "w8a16",
    "fp8",
    "fp8_blocks",
    "int16x8",
    "codebook4",
    "codebook4_int8",
    "codebook3",
    "codebook4+4",
)


def layers(scheme: str, n: int, k: int, *, bias: bool) -> list[qcut.Linear]:
    """Quantized layers of float16 on the GPU, one for each expert."""
    made = []
    for e in range(COUNT):
        torch.manual_seed(1000 * n + e)
        linear = nn.Linear(k, n, bias=bias, dtype=torch.float16)
        static_range = qcut.StaticRange(-4.0 - e, 4.0) if scheme.endswith("static") else None
        made.append(qcut.Linear.from_float(linear, scheme, static_range=static_range).to(DEVICE))
    return made


def routes(tokens: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights; no route goes to the last expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=generator).half()
    index = torch.stack([torch.randperm(COUNT - 1, generator=generator)[:count] for _ in range(tokens)])
    return x.to(DEVICE), index.to(DEVICE), torch.rand(tokens, count, generator=generator).half().to(DEVICE)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_routes_are_those_of_single_layers(scheme: str, tokens: int) -> None:
    up, down = layers(scheme, 2 * WIDTH, H, bias=True), layers(scheme, H, WIDTH, bias=False)
    gating = Gating("silu", limit=7.0)
    gate = gating.gated_silu
    assert gate is not None
    experts = Experts(LinearStack.of(up), LinearStack.of(down), gating)
    x, index, weights = routes(tokens, 2)
    with torch.no_grad():
        found = experts(x, index, weights)
        each = torch.zeros(tokens, 2, H, dtype=torch.float16, device=DEVICE)
        for e in range(COUNT):
            token, route = (index == e).nonzero(as_tuple=True)
            if len(token):
                y = up[e](x[token])
                by_kernels = not scheme.endswith("_static")
                gated = torch.ops.qcut.silu_mul(*y.chunk(2, -1), None, *gate) if by_kernels else gating(y)
                each[token, route] = down[e](gated)
    want = weighted_sum(each, weights).half()
    if scheme in FLOAT_SUMS:  # kernels of 16-bit tokens add in an order of their own
        assert sqnr_db(want.double().cpu(), found.double().cpu()) > 50
    else:
        assert_same(found, want)


def mixture(scheme: str) -> Experts:
    up, down = layers(scheme, 2 * WIDTH, H, bias=True), layers(scheme, H, WIDTH, bias=False)
    return Experts(LinearStack.of(up), LinearStack.of(down), Gating("silu"))


@pytest.mark.parametrize("tokens", [1, 3, 80, 400])
@pytest.mark.parametrize(
    "scheme", ["codebook4", "codebook4_int8", "w8a8", "w8a8_rotated_g64", "w8a16", "int16x8", "fp8", "fp8_blocks"]
)
def test_graphs_follow_their_routes(scheme: str, tokens: int) -> None:
    experts = mixture(scheme)
    held = [t.clone() for t in routes(tokens, 2)]
    with torch.no_grad():
        experts(*held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = experts(*held)
        for seed in (1, 2):
            for t, new in zip(held, routes(tokens, 2, seed), strict=True):
                t.copy_(new)
            graph.replay()
            assert_same(got, experts(*held))
            whole = copy.deepcopy(experts).cpu()(*(t.cpu() for t in held))
            assert sqnr_db(whole.double(), got.double().cpu()) > 45


def test_routes_of_other_processes_add_nothing() -> None:
    experts = mixture("codebook4_int8")
    x, index, weights = routes(9, 2)
    with torch.no_grad():
        kept = weights.clone()
        kept[:, 0] = 0
        elsewhere = index.clone()
        elsewhere[:, 0] = COUNT
        assert_same(experts(x, elsewhere, kept), experts(x, index, kept))
        assert not experts(x, torch.full_like(index, COUNT + 3), weights).any()


def test_capture_and_bad_routes_are_refused() -> None:
    """Where the host reads the routes."""
    experts = mixture("codebook4+3")
    x, index, weights = routes(3, 2)
    with torch.no_grad():
        expected = experts(x, index, weights)
        with pytest.raises(UnsupportedError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            experts(x, index, weights)
        torch.cuda.synchronize()
        with pytest.raises(RangeError, match="expert 6"):
            experts(x, torch.full_like(index, COUNT), weights)
        assert_same(experts(x, index, weights), expected)


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_mixture_moves_to_the_gpu_and_back(scheme: str) -> None:
    up, down = layers(scheme, 2 * WIDTH, H, bias=False), layers(scheme, H, WIDTH, bias=False)
    experts = Experts(LinearStack.of(up), LinearStack.of(down), Gating("gelu_tanh"))
    x, index, weights = routes(9, 3)
    with torch.no_grad():
        expected = experts(x, index, weights)
        away = copy.deepcopy(experts).cpu()
        assert not any(buffer.is_cuda for buffer in away.buffers())
        assert_same(away.to(DEVICE)(x, index, weights), expected)
