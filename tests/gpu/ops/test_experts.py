"""Products of codebook weights of experts on CUDA: each route is what its expert's layer makes of its token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.tokens import Int8Tokens, Prepared, RotatedTokens
from qcut.numerics.routing import RouteTiles
from qcut.ops.experts import TILE_SIZES
from tests.gpu.support.oracles import DEVICE, assert_same

OPS = torch.ops.qcut
INT8 = ("codebook4_int8", "codebook3_g64_int8", "codebook4_pairs_int8", "int4_g16_int8")
FLOATS = ("codebook4", "codebook3_g64", "codebook4_pairs", "codebook4_g32", "codebook4_none", "int4_g16", "nvfp4")


def stack(scheme: str, experts: int, n: int, k: int, *, bias: bool = True, dtype: Any = torch.float16) -> LinearStack:
    layers = []
    for e in range(experts):
        torch.manual_seed(100 * n + e)
        layers.append(qcut.Linear.from_float(nn.Linear(k, n, bias=bias), scheme).to(DEVICE))
    return LinearStack.of(layers)


def routes(tokens: int, top_k: int, experts: int, size: int, seed: int = 0) -> tuple[Tensor, RouteTiles]:
    """Experts int32 ``[M, k]``, some of them none, and their tiles."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(experts + 1, generator=generator)[:top_k] for _ in range(tokens)]).int()
    index[index == experts] = -1 if seed % 2 else experts + 5
    index = index.to(DEVICE)
    if size == 1 and seed % 2 == 0:
        return index, RouteTiles(index.flatten(), None, index.numel())
    return index, RouteTiles(*OPS.sort_routes(index, experts, size), index.numel())


def each(layers: LinearStack, x: Tensor, index: Tensor, per_row: int) -> Tensor:
    """The results of routes by the layers of experts; NaN of routes to none."""
    of_routes = index.flatten()
    y = x.new_full((len(of_routes), layers.out_features), float("nan"))
    for e in range(layers.experts):
        mine = (of_routes == e).nonzero()[:, 0]
        if len(mine):
            y[mine] = layers.expert(e)(x[mine // per_row])
    return y


def check(scheme: str, got: Tensor, want: Tensor) -> None:
    there = ~want.isnan().any(1)
    got, want = got[there], want[there]
    assert got.isfinite().all()
    if scheme in INT8:
        assert_same(got, want)
    else:
        error = (got.double() - want.double()).abs().max() / want.double().abs().max()
        assert error < 2.0**-7 if got.dtype is torch.bfloat16 else 2.0**-9


@pytest.mark.parametrize("size", TILE_SIZES)
@pytest.mark.parametrize("scheme", [*INT8, *FLOATS])
def test_routes_are_those_of_layers(scheme: str, size: int) -> None:
    layers = stack(scheme, 5, 200, 384)
    norms_of_16 = scheme in ("int4_g16", "nvfp4")  # whose tiles of 32, which nothing chooses, lack a register
    if size > layers.form.largest_tile or (scheme in INT8 and size in (96, 160)) or (norms_of_16 and size == 32):
        pytest.skip(f"{scheme} has no tile of {size}")
    for tokens, top_k, seed in ((1, 3, 0), (7, 2, 1), (65, 4, 2), (300, 3, 3)):
        index, tiles = routes(tokens, top_k, 5, size, seed)
        x = torch.randn(tokens, 384, device=DEVICE, dtype=torch.float16)
        got = layers.routed(x, tiles, top_k)
        assert got is not None
        check(scheme, got, each(layers, x, index, top_k))


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("scheme", [INT8[0], FLOATS[0], "w8a8"])
def test_tokens_may_be_prepared_before(scheme: str, size: int) -> None:
    layers = stack(scheme, 5, 200, 384)
    one: Any = layers.form
    for tokens, top_k, seed in ((1, 3, 0), (7, 2, 1), (64, 4, 2)):
        index, tiles = routes(tokens, top_k, 5, size, seed)
        x = torch.randn(tokens, 384, device=DEVICE, dtype=torch.float16)
        prepared: Prepared
        if scheme == "w8a8":
            prepared = Int8Tokens(*OPS.quantize_per_token(x, 384), x.dtype)
        else:
            signs, to = one._rotation.operands_for(x), torch.int8 if one.int8 else x.dtype
            made = OPS.rotate_tokens(x, signs, one.kind, one.group_size, one.scheme.seeds, to)
            prepared = RotatedTokens(*made, tokens, x.dtype)
        got, want = layers.routed(prepared, tiles, top_k), layers.routed(x, tiles, top_k)
        assert got is not None
        assert want is not None
        there = ((index >= 0) & (index < 5)).flatten()
        assert_same(got[there], want[there])


@pytest.mark.parametrize("size", [1, 8, 32, 128])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (1, 160), (768, 2048), (130, 4096), (64, 14336), (1040, 8192)])
@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8"])
def test_shapes(scheme: str, n: int, k: int, size: int) -> None:
    if k > 4096 and size == 32:
        pytest.skip("`Experts` takes tiles of 16")
    layers = stack(scheme, 3, n, k, bias=False)
    for dtype in (torch.float16, torch.bfloat16):
        index, tiles = routes(40, 1, 3, size, 1)
        x = torch.randn(40, k, device=DEVICE, dtype=dtype)
        got = layers.routed(x, tiles, 1)
        assert got is not None
        check(scheme, got, each(layers, x, index, 1))


SUMS = [(8, 768, 2048), (8, 1024, 2048), (4, 2880, 2880), (6, 1408, 2048), (2, 14336, 256), (1, 128, 33)]
"""Routes of a token, K and N: a cluster where K is long, and where no kernel adds, the rows and their sums."""


@torch.no_grad()
@pytest.mark.parametrize(
    "scheme", ["codebook4", "codebook4_int8", "codebook3_g64", "codebook4_pairs", "codebook4_none", "int4_g16"]
)
def test_sums_are_those_of_the_rows(scheme: str) -> None:
    for top_k, k, n in SUMS:
        layers = stack(scheme, 3, n, k)
        for tokens, dtype in ((1, torch.float16), (3, torch.bfloat16)):
            generator = torch.Generator().manual_seed(tokens)
            index = torch.randint(-1, 5, (tokens, top_k), generator=generator, dtype=torch.int32).to(DEVICE)
            tiles = RouteTiles(index.flatten(), None, index.numel())
            x = torch.randn(tokens * top_k, k, generator=generator).to(dtype).to(DEVICE)
            weights = torch.rand(tokens, top_k, generator=generator).to(DEVICE)
            got, rows = layers.routed(x, tiles, 1, weights=weights), layers.routed(x, tiles, 1)
            assert got is not None
            assert rows is not None
            want = OPS.sum_routes(rows, weights, index, 3, None)
            if "int8" in scheme:
                assert_same(got, want)
            else:
                error = (got.double() - want.double()).abs().max() / rows[rows.isfinite()].double().abs().max()
                assert error < 2.0**-7 if dtype is torch.bfloat16 else 2.0**-9
            assert_same(layers.routed(x, tiles, 1, weights=weights), got)


@torch.no_grad()
def test_captured_sums_follow_the_routes() -> None:
    layers = stack("codebook4_int8", 6, 512, 256)
    index = torch.tensor([[0, 3, 5, 2]], dtype=torch.int32, device=DEVICE)
    tiles, weights = RouteTiles(index.flatten(), None, 4), torch.rand(1, 4, device=DEVICE)
    x = torch.randn(4, 256, device=DEVICE, dtype=torch.float16)
    layers.routed(x, tiles, 1, weights=weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers.routed(x, tiles, 1, weights=weights)
    assert got is not None
    for chosen in ([1, 1, 4, 0], [-1, 2, 6, 3], [-1, -1, 9, 7]):
        index.copy_(torch.tensor([chosen], dtype=torch.int32))
        weights.uniform_()
        x.normal_()
        graph.replay()
        rows = layers.routed(x, tiles, 1)
        assert_same(got, OPS.sum_routes(rows, weights, index, 6, None))


@pytest.mark.parametrize("size", [1, 8, 128])
def test_one_expert_is_a_layer(size: int) -> None:
    layers = stack("codebook4_int8", 1, 256, 512)
    x = torch.randn(20, 512, device=DEVICE, dtype=torch.float16)
    index = torch.zeros(20, 1, dtype=torch.int32, device=DEVICE)
    got = layers.routed(x, RouteTiles(*OPS.sort_routes(index, 1, size), 20), 1)
    assert_same(got, layers.expert(0)(x))


@pytest.mark.parametrize("size", [1, 8, 256])
def test_replays_follow_the_routes(size: int) -> None:
    layers = stack("codebook4_int8", 6, 192, 256)
    x = torch.randn(33, 256, device=DEVICE, dtype=torch.float16)
    index, _ = routes(33, 2, 6, size, 1)
    held = index.clone()

    def run() -> Tensor:
        tiles = RouteTiles(*OPS.sort_routes(held, 6, size), held.numel())
        result = layers.routed(x, tiles, 2)
        assert result is not None
        return result

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for seed in range(5):
        held.copy_(routes(33, 2, 6, size, seed)[0])
        graph.replay()
        check("codebook4_int8", got, each(layers, x, held, 2))


def test_no_tokens_and_no_routes() -> None:
    layers = stack("codebook4", 3, 64, 128)
    empty = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    got = layers.routed(torch.zeros(0, 128, device=DEVICE).half(), RouteTiles(*OPS.sort_routes(empty, 3, 8), 0), 2)
    assert got is not None
    assert got.shape == (0, 64)
    nowhere = torch.full((9, 2), 7, dtype=torch.int32, device=DEVICE)
    for size in (8, 128):
        tiles = RouteTiles(*OPS.sort_routes(nowhere, 3, size), 18)
        assert layers.routed(torch.zeros(9, 128, device=DEVICE).half(), tiles, 2) is not None
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [1, 8, 32, 128])
@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a8", "w8a16"])
def test_numbers_of_no_route_harm_nothing(scheme: str, size: int) -> None:
    """A dry run launches a product before the kernel that sorts routes has been built."""
    layers = stack(scheme, 4, 192, 256)
    if size > layers.form.largest_tile:
        pytest.skip(f"{scheme} has tiles of up to {layers.form.largest_tile}")
    x = torch.randn(70, 256, device=DEVICE, dtype=torch.float16)
    index, tiles = routes(70, 2, 4, size, 1)
    want = layers.routed(x, tiles, 2)
    anything = torch.randint(-(2**31), 2**31 - 1, (2, tiles.places), dtype=torch.int32, device=DEVICE)
    experts = anything[0, : len(tiles.experts)].contiguous()
    experts[::3] %= 4
    left = RouteTiles(experts, anything[1].view(-1, size), 140)
    assert layers.routed(x, left, 2) is not None
    torch.cuda.synchronize()
    got = layers.routed(x, tiles, 2)
    assert got is not None
    assert want is not None
    there = ((index >= 0) & (index < 4)).flatten()
    assert_same(got[there], want[there])
