"""Products with bytes of experts on CUDA: W8A8 is bitwise what the layers of the experts make of the tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics.routing import RouteTiles
from qcut.schemes import padded_k
from tests.gpu.support.oracles import DEVICE, activations, assert_same
from tests.support.routes import in_tiles, random_experts, tiles_of

OPS = torch.ops.qcut
HALF, SINGLE = torch.float16, torch.float32
SHAPES = ((1, 1), (33, 77), (70, 2049), (1536, 2048), (2048, 768))
"""(N, K)."""
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="tiles of prompts need wgmma"
)
CASES = [
    *((scheme, size) for scheme in ("w8a8", "w8a16", "fp8", "fp8_blocks") for size in (1, 8, 16, 32)),
    *(("int16x8", size) for size in (1, 8)),
    *(pytest.param(scheme, 128, marks=HOPPER) for scheme in ("w8a8", "w8a16", "fp8", "fp8_blocks")),
    pytest.param("w8a8", 256, marks=HOPPER),
]
"""Schemes and routes of a tile."""
PROMPTS = [pytest.param(scheme, 128, marks=HOPPER) for scheme in ("w8a8", "w8a16")]
CLUSTERS = ((64, 14336), (130, 14336), (33, 8192))
"""Those for which K is divided over a cluster with few routes."""


def stack_of(scheme: str, experts: int, n: int, k: int, *, bias: bool = True, activation: str = "none") -> LinearStack:
    layers = []
    for e in range(experts):
        torch.manual_seed(1000 * n + e)
        layers.append(qcut.Linear.from_float(nn.Linear(k, n, bias), scheme, activation=activation))
    return LinearStack.of(layers).to(DEVICE)


def on_device(tiles: RouteTiles) -> RouteTiles:
    return RouteTiles(tiles.experts.to(DEVICE), None if tiles.routes is None else tiles.routes.to(DEVICE), tiles[2])


def by_layers(stack: LinearStack, x: Tensor, chosen: Tensor) -> Tensor:
    """The rows of routes of the layers of experts, one expert after the other; zeros of routes of no expert."""
    y = x.new_zeros(chosen.numel(), stack.out_features)
    for e in range(stack.experts):
        mine = (chosen.flatten() == e).nonzero()[:, 0].to(DEVICE)
        if len(mine):
            y[mine] = stack.expert(e)(x[mine // chosen.shape[1]])
    return y


def agree(stack: LinearStack, x: Tensor, got: Tensor, want: Tensor, routes: Tensor) -> None:
    """Bitwise with integer tokens. Of others two orders of float32 sums, each within K * 2**-23 of magnitudes' sum."""
    got, want = got[routes], want[routes]
    if stack.scheme.int8_products:
        assert_same(got, want)
        return
    most = 448 if stack.scheme.name.startswith("fp8") else 127
    k, largest = x.shape[1], float(stack._buffers["weight_scale"].max()) * most  # type: ignore[union-attr]
    slack = 2 * k * 2.0**-23 * largest * float(x.float().abs().sum(1).max())
    torch.testing.assert_close(got, want, rtol=2.0**-7 if x.dtype is torch.bfloat16 else 2.0**-10, atol=slack)


@torch.no_grad()
def check(stack: LinearStack, rows: int, per_row: int, size: int, dtype: torch.dtype = HALF, seed: int = 0) -> None:
    chosen = random_experts(rows, per_row, stack.experts, seed)
    tiles = on_device(tiles_of(chosen, stack.experts, size))
    x = torch.randn(rows, stack.in_features, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    want, routes = by_layers(stack, x, chosen), in_tiles(chosen, stack.experts).to(DEVICE)
    first = stack.routed(x, tiles, per_row)
    assert first is not None
    assert first.dtype is dtype
    agree(stack, x, first, want, routes)
    again = stack.routed(x, tiles, per_row)
    assert again is not None
    assert_same(again[routes], first[routes])


@pytest.mark.parametrize(("scheme", "size"), CASES)
@pytest.mark.parametrize("experts", [1, 7])
def test_equals_the_layers_of_the_experts(scheme: str, experts: int, size: int) -> None:
    for n, k in SHAPES:
        stack = stack_of(scheme, experts, n, k)
        for rows, per_row in ((1, 1), (5, 3), (64, 2)):
            check(stack, rows, per_row, size, seed=rows)


@pytest.mark.parametrize(("scheme", "size"), CASES)
def test_k_over_clusters(scheme: str, size: int) -> None:
    for n, k in CLUSTERS:
        check(stack_of(scheme, 3, n, k), 2, 2, size)
    check(stack_of(scheme, 3, 1040, 8192), 40, 2, size)  # a cluster sends sums several times, of several experts


@pytest.mark.parametrize(
    ("bias", "activation"), [(False, "none"), (True, "relu"), (True, "gelu_tanh"), (False, "silu")]
)
@pytest.mark.parametrize(("scheme", "size"), [case for case in CASES if case not in (("w8a8", 16), ("w8a8", 32))])
def test_epilogues(scheme: str, size: int, bias: bool, activation: str) -> None:
    stack = stack_of(scheme, 7, 201, 320, bias=bias, activation=activation)
    for dtype in (HALF, torch.bfloat16, *((SINGLE,) if scheme in ("w8a8", "int16x8") else ())):
        check(stack, 20, 2, size, dtype)


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "size"), [*(("w8a8", s) for s in (1, 8)), *(("int16x8", s) for s in (1, 8)), *CASES[-1:]]
)
def test_extreme_tokens_and_nan(scheme: str, size: int) -> None:
    stack = stack_of(scheme, 3, 129, 640)
    chosen = torch.arange(18, dtype=torch.int32).view(9, 2) % 4  # expert 3 does not exist
    x = activations(9, 640, HALF).to(DEVICE)
    x[7, 3] = float("nan")
    routes = in_tiles(chosen, 3).to(DEVICE)
    y = stack.routed(x, on_device(tiles_of(chosen, 3, size)), 2)
    assert y is not None
    assert_same(y[routes], by_layers(stack, x, chosen)[routes])


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "size"), [("int16x8", 8), *((scheme, 8) for scheme in ("w8a8", "w8a16")), *PROMPTS])
def test_tokens_of_any_layout(scheme: str, size: int) -> None:
    stack, chosen = stack_of(scheme, 5, 65, 100), random_experts(12, 2, 5)
    routes, tiles = in_tiles(chosen, 5).to(DEVICE), on_device(tiles_of(chosen, 5, size))
    wide = torch.randn(12, 208, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    for x in (wide[:, :100], wide[:, 1:101], wide[:, ::2][:, :100], wide.t()[:12].t()[:, :1].expand(12, 100)):
        y = stack.routed(x, tiles, 2)
        assert y is not None
        agree(stack, x, y, by_layers(stack, x, chosen), routes)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "size"), CASES)
def test_graphs_follow_the_routes(scheme: str, size: int) -> None:
    experts, rows, per_row = 7, 24, 2
    stack = stack_of(scheme, experts, 1536, 512)
    static = on_device(tiles_of(random_experts(rows, per_row, experts, 1), experts, size))
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    stack.routed(x, static, per_row)  # builds the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = stack.routed(x, static, per_row)
    assert y is not None
    alike = torch.full((rows, per_row), experts - 1, dtype=torch.int32)
    none = torch.full((rows, per_row), -1, dtype=torch.int32)
    one = none.clone()
    one[3, 1] = 4
    for chosen in (random_experts(rows, per_row, experts, 2), alike, none, one, random_experts(rows, per_row, 3, 5)):
        tiles = on_device(tiles_of(chosen, experts, size))
        static.experts.copy_(tiles.experts)
        if static.routes is not None and tiles.routes is not None:
            static.routes.copy_(tiles.routes)
        y.fill_(9.0)
        graph.replay()
        routes = in_tiles(chosen, experts).to(DEVICE)
        agree(stack, x, y, by_layers(stack, x, chosen), routes)
        assert bool((y[~routes] == 9.0).all()), "rows of routes in no tile are not written"


@torch.no_grad()
@pytest.mark.parametrize("size", [8, pytest.param(128, marks=HOPPER)])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_tiles_without_expert_or_route(scheme: str, size: int) -> None:
    stack = stack_of(scheme, 3, 64, 256)
    x = torch.randn(4, 256, device=DEVICE, dtype=HALF)
    experts = torch.tensor([-1, 2, 3, 1, -7], dtype=torch.int32, device=DEVICE)
    routes = torch.full((5, size), -1, dtype=torch.int32, device=DEVICE)
    routes[1, :3] = torch.tensor([6, 0, 3], dtype=torch.int32)  # in any order
    routes[2, 0] = 1  # of an expert that does not exist; the tile of expert 1 has no route
    y = stack.routed(x, RouteTiles(experts, routes, 8), 2)
    assert y is not None
    torch.cuda.synchronize()
    chosen = torch.full((4, 2), -1, dtype=torch.int32)
    chosen.view(-1)[[6, 0, 3]] = 2
    agree(stack, x, y, by_layers(stack, x, chosen), in_tiles(chosen, 3).to(DEVICE))
    assert stack.routed(x[:0], RouteTiles(experts[:0], routes[:0], 0), 2) is not None


@torch.no_grad()
@HOPPER
@pytest.mark.parametrize(("scheme", "size"), [("w8a8", 128), ("w8a8", 256), ("w8a16", 128)])
def test_short_tiles(scheme: str, size: int) -> None:
    """Tiles with routes in up to one half take products of half as many tokens."""
    stack = stack_of(scheme, 2, 130, 320)
    for first, second in ((size // 2, size // 2 + 1), (size, 1), (size + 1, size + size // 2), (2 * size - 1, 0)):
        chosen = torch.tensor([0] * first + [1] * second, dtype=torch.int32)[:, None]
        x = torch.randn(first + second, 320, generator=torch.Generator().manual_seed(first)).half().to(DEVICE)
        y = stack.routed(x, on_device(tiles_of(chosen, 2, size)), 1)
        assert y is not None
        agree(stack, x, y, by_layers(stack, x, chosen), in_tiles(chosen, 2).to(DEVICE))


@torch.no_grad()
@HOPPER
def test_prompts_of_a_real_size() -> None:
    """All that a persistent CTA goes through: many tiles of an expert, experts without routes, whole and part tiles."""
    for scheme, n, k, tokens, size in (("w8a8", 1536, 2048, 2048, 256), ("w8a16", 768, 1056, 1024, 128)):
        check(stack_of(scheme, 32, n, k), tokens, 4, size)
        check(stack_of(scheme, 32, n, k), tokens, 4, size, seed=1)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_weights_beyond_two_gibibytes(scheme: str) -> None:
    experts, n, k = 6, 28672, 16384
    assert experts * n * padded_k(k) > 2**31
    qweight = torch.randint(-127, 128, (experts, n, k), dtype=torch.int8, device=DEVICE)
    scale = torch.rand(experts, n, device=DEVICE) / 1000 + 1e-4
    x = torch.randn(3, k, device=DEVICE, dtype=HALF)
    chosen = torch.tensor([5, 4, 0], dtype=torch.int32, device=DEVICE)
    if scheme == "w8a8":
        q, q_scale = OPS.quantize_per_token(x, k)
        y = OPS.w8a8_experts(q, q_scale, 3, 1, chosen, None, qweight, scale, None, "none", HALF)
    else:
        y = OPS.w8a16_experts(x, 3, k, 1, chosen, None, qweight, scale, None, "none")
    for route, e in enumerate(chosen.tolist()):
        linear = OPS.w8a8_linear if scheme == "w8a8" else OPS.w8a16_linear
        want = linear(x[route : route + 1], qweight[e], scale[e], None, "none")
        if scheme == "w8a8":
            assert_same(y[route : route + 1], want)
        else:
            torch.testing.assert_close(y[route : route + 1], want, rtol=2.0**-9, atol=1e-2)
