"""Routes of experts on CUDA: choices, tiles and sums bitwise the CPU's, weights within a derived bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType
from qcut.emitters.routing import linear_route
from qcut.emitters.routing.linear_route import LinearRoute
from qcut.emitters.routing.route import SCORES, SLOTS, RouteTokens
from qcut.emitters.routing.sort_routes import FEW_ROUTES, MANY_ROUTES, SortRoutes
from qcut.emitters.routing.sum_routes import MANY_TOKENS, SumRoutes
from qcut.numerics import routing
from tests.gpu.support.launching import Guarded, arch, launch, strided
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same

OPS = torch.ops.qcut
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ROWS = (1, 2, 3, 4, 5, 33, 129)
SIZES = (
    (1, 1),
    (8, 2),
    (31, 31),
    (32, 4),
    (33, 5),
    (60, 4),
    (128, 8),
    (160, 6),
    (256, 8),
    (384, 8),
    (1000, 10),
    (1024, 32),
)
"""(E, k)."""
GROUPS = ((160, 6, 8, 3), (256, 8, 8, 4), (24, 12, 4, 2), (64, 6, 32, 7), (1024, 32, 2, 1), (30, 3, 15, 3))
"""(E, k, groups, top_groups)."""


def routed(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights and experts from CUDA, which must agree with themselves."""
    given = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in (logits, *args)]
    weights, experts = OPS.route(*given, **options)
    for one, other in zip(OPS.route(*given, **options), (weights, experts), strict=True):
        assert_same(one, other)
    return weights.cpu(), experts.cpu()


def assert_near(got: Tensor, want: Tensor, experts: int) -> None:
    """Both have scores within (E + 128) 2**-24; sums of up to 32 of them and three operations follow."""
    error = (got.double() - want.double()).abs()
    assert bool((error <= want.double().abs() * ((experts + 200) * 2.0**-22) + 2.0**-120).all())


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("e", "k"), SIZES)
def test_choice_of_logits_is_the_cpus(dtype: torch.dtype, scores: str, e: int, k: int) -> None:
    for m in ROWS:
        logits = (4 * torch.randn(m, e)).to(dtype)
        for renormalize in (False, True):
            options: dict[str, Any] = {"renormalize": renormalize, "eps": 1e-20, "scaling": 2.5}
            weights, experts = routed(logits, None, scores, k, **options)
            want, chosen = routing.route(logits, None, scores, k, **options)
            assert_same(experts, chosen)
            assert_near(weights, want, e)


@pytest.mark.parametrize(("e", "k", "groups", "top_groups"), GROUPS)
def test_groups_and_ties_are_the_cpus(e: int, k: int, groups: int, top_groups: int) -> None:
    """Scores of few values, with exact sums."""
    bias = torch.randint(-2, 3, (e,)).float()
    for m in ROWS:
        logits = torch.randint(-3, 4, (m, e)).float()
        logits[torch.rand(m, e) < 0.05] = math.nan
        logits[torch.rand(m, e) < 0.05] = -math.inf
        for added in (None, bias):
            for group_score in routing.GROUP_SCORES:
                args = (added, "logits", k, groups, top_groups, group_score)
                assert_same(routed(logits, *args)[1], routing.route(logits, *args)[1])


@pytest.mark.parametrize(("e", "k", "groups", "top_groups"), GROUPS)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_choice_of_scores_is_within_their_rounding(scores: str, e: int, k: int, groups: int, top_groups: int) -> None:
    logits, bias = torch.randn(300, e), 0.1 * torch.randn(e)
    args = (bias, scores, k, groups, top_groups, "top2")
    (weights, experts), (want, chosen) = routed(logits, *args), routing.route(logits, *args)
    equal = (experts == chosen).all(1)
    assert int((~equal).sum()) <= 15, "scores that differ by their last bits"
    assert_near(weights[equal], want[equal], e)


def test_rows_of_nan_choose_the_first_experts() -> None:
    for scores in SCORES:
        weights, experts = routed(torch.full((3, 40), math.nan), torch.zeros(40), scores, 5, 4, 2, "top2", True)
        assert experts.tolist() == [[0, 1, 2, 3, 4]] * 3
        assert bool(weights.isnan().all())


def test_rows_of_any_strides() -> None:
    wide = torch.randn(9, 200).half()
    for logits in (wide[:, 3:131], wide[::2, :128], wide.t().contiguous().t()):
        assert_same(routed(logits, None, "softmax", 4)[1], routing.route(logits, None, "softmax", 4)[1])


# ── routers ──────────────────────────────────────────────────────────────────────────────────────

ROUTERS = ((8, 4096, 2), (60, 2048, 4), (128, 2048, 8), (40, 1536, 8), (1, 8, 1), (333, 1000, 7), (64, 8192, 6))
"""(E, H, k); all are served by one kernel."""
TYPES = (
    (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float32, torch.float32),
)
"""Of tokens, weights and logits."""
TOKENS = (1, 2, 3, 15, 16, 17, 31, 33, 50, 63, 64)


def routed_tokens(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights and experts from CUDA, the same whether the weight is read early or not."""
    given = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in (x, weight, *args)]
    found = OPS.linear_route(*given, **options)
    for one, other in zip(OPS.linear_route.early_read(*given, **options), found, strict=True):
        assert_same(one, other)
    return found[0].cpu(), found[1].cpu()


def small_integers(m: int, e: int, h: int) -> tuple[Tensor, Tensor]:
    """Tokens and weights with logits that are exact in any order of sums, and many ties."""
    return torch.randint(-1, 2, (m, h)).float(), torch.randint(-1, 2, (e, h)).float()


@pytest.mark.parametrize(("x", "weight", "logits"), TYPES)
@pytest.mark.parametrize(("e", "h", "k"), ROUTERS)
def test_exact_logits_choose_as_the_cpu(
    x: torch.dtype, weight: torch.dtype, logits: torch.dtype, e: int, h: int, k: int
) -> None:
    for m in TOKENS:
        tokens, matrix = small_integers(m, e, h)
        exact = (tokens.double() @ matrix.double().t()).to(logits)
        for scores in SCORES:
            options: dict[str, Any] = {"renormalize": True, "eps": 1e-20, "scaling": 2.5}
            got, experts = routed_tokens(tokens.to(x), matrix.to(weight), logits, None, scores, k, **options)
            want, chosen = routing.route(exact, None, scores, k, **options)
            assert_same(experts, chosen)
            assert_near(got, want, e)


@pytest.mark.parametrize(("x", "weight", "logits"), TYPES)
@pytest.mark.parametrize(("e", "h", "k"), [*ROUTERS, (128, 2880, 4), (32, 2880, 4)])
def test_biases_are_added_to_exact_logits(
    x: torch.dtype, weight: torch.dtype, logits: torch.dtype, e: int, h: int, k: int
) -> None:
    """Before they are rounded, of both types."""
    for m in (1, 17, 64):
        tokens, matrix = small_integers(m, e, h)
        for kind in dict.fromkeys((weight, torch.float32)):
            bias = (torch.randn(e) * 8).to(kind)
            exact = (tokens.double() @ matrix.double().t() + bias.double()).float().to(logits)
            for added in (None, torch.randint(-2, 3, (e,)).float()):
                args = (tokens.to(x), matrix.to(weight), logits, added, "logits", k)
                got, experts = routed_tokens(*args, logits_bias=bias.to(DEVICE))
                want, chosen = routing.route(exact, added, "logits", k)
                assert_same(experts, chosen)
                assert_near(got, want, e)


@pytest.mark.parametrize(("e", "k", "groups", "top_groups"), GROUPS)
def test_groups_of_exact_logits_are_the_cpus(e: int, k: int, groups: int, top_groups: int) -> None:
    bias = torch.randint(-2, 3, (e,)).float()
    for m in (1, 17, 40):
        tokens, matrix = small_integers(m, e, 256)
        for added in (None, bias):
            for group_score in routing.GROUP_SCORES:
                args = (added, "logits", k, groups, top_groups, group_score)
                found = routed_tokens(tokens.half(), matrix.half(), torch.float32, *args)
                assert_same(found[1], routing.route(tokens @ matrix.t(), *args)[1])


@pytest.mark.parametrize(("x", "weight", "logits"), [types for types in TYPES if types[2] is torch.float32])
@pytest.mark.parametrize(("e", "h", "k"), ROUTERS)
def test_logits_are_within_the_bound_of_their_sums(
    x: torch.dtype, weight: torch.dtype, logits: torch.dtype, e: int, h: int, k: int
) -> None:
    """A thread adds up to 16 products one by one; sums of 32 lanes, and of up to 16 warps, follow."""
    tokens, matrix = torch.randn(64, h).to(x), torch.randn(e, h).to(weight)
    wide, wide_weight = tokens.double(), matrix.double()
    exact = wide @ wide_weight.t()
    bound = (wide.abs() @ wide_weight.abs().t()).amax(1, keepdim=True) * (64 * 2.0**-24)
    got, experts = routed_tokens(tokens, matrix, logits, None, "sigmoid", k)
    ranked = exact.sort(dim=1, descending=True, stable=True)
    gaps = ranked.values[:, :-1] - ranked.values[:, 1:]
    clear = (gaps[:, :k] > 2 * bound).all(1)
    assert int(clear.sum()) >= 48, "few tokens have choices that rounding could change"
    assert_same(experts[clear].long(), ranked.indices[clear, :k])
    error = (got.double() - exact.gather(1, experts.long()).sigmoid()).abs()
    assert bool((error <= bound / 4 + 2.0**-21).all())


@pytest.mark.parametrize(("e", "h", "k"), ROUTERS)
def test_a_token_is_routed_as_without_the_others(e: int, h: int, k: int) -> None:
    for x, weight, logits in TYPES:
        tokens, matrix = torch.randn(64, h).to(x).to(DEVICE), torch.randn(e, h).to(weight).to(DEVICE)
        alone = [OPS.linear_route(row[None], matrix, logits, None, "softmax", k) for row in tokens]
        for m in TOKENS:
            for part, all_alone in zip(
                OPS.linear_route(tokens[:m], matrix, logits, None, "softmax", k), zip(*alone, strict=True), strict=True
            ):
                assert_same(part, torch.cat(all_alone[:m]))


def test_nan_and_infinity_stay_with_their_tokens() -> None:
    tokens, matrix = small_integers(40, 60, 512)
    tokens, matrix = tokens.half(), matrix.half()
    tokens[7] = math.nan
    tokens[21, 3] = math.inf
    matrix[:, 3] = torch.randint(0, 2, (60,)) * 2 - 1
    clean = routed_tokens(tokens.nan_to_num(0, 0, 0), matrix, torch.float16, None, "softmax", 5)
    weights, experts = routed_tokens(tokens, matrix, torch.float16, None, "softmax", 5)
    others = [i for i in range(40) if i not in (7, 21)]
    assert_same(weights[others], clean[0][others])
    assert_same(experts[others], clean[1][others])
    logits = tokens.float() @ matrix.float().t()
    assert_same(experts[[7, 21]], routing.route(logits[[7, 21]], None, "softmax", 5)[1])
    assert experts[7].tolist() == [0, 1, 2, 3, 4]
    assert bool(weights[7].isnan().all())
    matrix[9] = math.inf
    found = routed_tokens(tokens[others].abs() + 1, matrix, torch.float16, None, "softmax", 1)[1]
    assert bool((found == 9).all())


def test_other_routers_are_torchs_product_and_a_choice() -> None:
    x, weight = torch.randn(9, 96, device=DEVICE).half(), torch.randn(60, 96, device=DEVICE).half()
    apart = torch.randn(9, 97, device=DEVICE).half()
    for tokens, matrix in (
        (torch.randn(200, 96, device=DEVICE).half(), weight),
        (x.float(), weight.float()),
        (x[:, :95], weight[:, :95]),
        (apart[:, :96], weight),
        (apart[:, 1:], weight),
        (x, weight.t().contiguous().t()),
        (torch.randn(3, 8192, device=DEVICE).half(), torch.randn(256, 8192, device=DEVICE).half()),
    ):
        bias = torch.randn(len(matrix), device=DEVICE)
        wide = F.linear(tokens.float(), matrix.float(), bias).to(matrix.dtype)
        for logits_bias, logits in (
            (None, F.linear(tokens, matrix)),
            (bias.to(matrix.dtype), F.linear(tokens, matrix, bias.to(matrix.dtype))),
            (bias, wide),
        ):
            want = OPS.route(logits, None, "softmax", 6)
            found = OPS.linear_route(tokens, matrix, matrix.dtype, None, "softmax", 6, logits_bias=logits_bias)
            for got, other in zip(found, want, strict=True):
                assert_same(got, other)
    assert OPS.linear_route(x[:0], weight, torch.float16, None, "softmax", 6)[1].shape == (0, 6)


@pytest.mark.parametrize("m", [1, 7, 64])
def test_a_graph_of_a_router_reads_new_tokens(m: int) -> None:
    """The router begins before its predecessor ends, and its successors begin after its results."""
    static, matrix = torch.zeros(m, 2048, device=DEVICE).half(), torch.randn(128, 2048, device=DEVICE).half()
    norm, results = torch.ones(2048, device=DEVICE).half(), torch.randn(m * 8, 512, device=DEVICE).half()

    def mixture() -> tuple[Tensor, ...]:
        _, x = OPS.add_norm.early_read(static, None, norm, None, False, 1e-6)
        weights, experts = OPS.linear_route.early_read(x, matrix, torch.float16, None, "softmax", 8)
        return *OPS.sort_routes(experts, 128, 8), OPS.sum_routes(results, weights, experts, 128), weights, experts

    mixture()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mixture()
    for _ in range(20):
        static.copy_(torch.randn(m, 2048))
        for result in found:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(found, mixture(), strict=True):
            assert_same(got, want)


# ── tiles ────────────────────────────────────────────────────────────────────────────────────────


def random_experts(m: int, k: int, count: int) -> Tensor:
    """Skewed, with numbers outside 0 to ``count - 1``."""
    experts = torch.randint(-1, count + 2, (m, k))
    return experts.where(torch.rand(m, k) < 0.7, count // 2).int()


@pytest.mark.parametrize("count", [1, 8, 60, 128, 1024])
@pytest.mark.parametrize("tile", [1, 8, 13, 33, 64, 256])
def test_tiles_are_the_cpus(count: int, tile: int) -> None:
    edges = (1, 2, 8, 31, 32, 33, FEW_ROUTES - 1, FEW_ROUTES, FEW_ROUTES + 1, MANY_ROUTES - 1, MANY_ROUTES, 9999)
    for routes in edges:
        experts = random_experts(routes, 1, count)
        for got, want in zip(
            OPS.sort_routes(experts.to(DEVICE), count, tile), routing.sort_routes(experts, count, tile), strict=True
        ):
            assert_same(got.cpu(), want)


@pytest.mark.parametrize(("m", "k", "count"), [(4096, 8, 128), (4096, 64, 512), (65536, 4, 32)])
def test_tiles_of_long_prompts(m: int, k: int, count: int) -> None:
    for experts in (random_experts(m, k, count), torch.zeros(m, k, dtype=torch.int32), torch.full((m, k), -1).int()):
        got = [OPS.sort_routes(experts.to(DEVICE), count, 64) for _ in range(2)]
        for one, other, want in zip(*got, routing.sort_routes(experts, count, 64), strict=True):
            assert_same(one, other)
            assert_same(one.cpu(), want)


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 7, 8, 77, 512, 2048, 2880, 4099])
def test_sums_are_the_cpus(dtype: torch.dtype, columns: int) -> None:
    for m, k in ((1, 8), (2, 1), (5, 9), (17, 32), (MANY_TOKENS, 4), (MANY_TOKENS + 1, 10)):
        results, weights = torch.randn(m * k, columns).to(dtype), torch.randn(m, k)
        experts, added = random_experts(m, k, 20), torch.randn(m, columns).to(dtype)
        outside = ((experts < 0) | (experts >= 20)).flatten()
        results[outside] = math.nan
        for last in (None, added):
            given = (results, weights, experts, 20, last)
            got = OPS.sum_routes(*(t.to(DEVICE) if isinstance(t, Tensor) else t for t in given))
            assert_same(got.cpu(), routing.sum_routes(*given))


def test_sums_of_many_tokens() -> None:
    results, weights = torch.randn(65536 * 2, 24).half(), torch.randn(65536, 2)
    experts = random_experts(65536, 2, 8)
    got = OPS.sum_routes(results.to(DEVICE), weights.to(DEVICE), experts.to(DEVICE), 8)
    assert_same(got.cpu(), routing.sum_routes(results, weights, experts, 8, None))


# ── memory and graphs ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("slots", SLOTS)
def test_routes_write_nothing_else(slots: int) -> None:
    desc, m, e = RouteTokens(DType.F32, "softmax", slots, False, arch()), 5, 32 * slots - 1
    logits, k = torch.randn(m, e), min(7, e)
    weights, experts = Guarded(m, k, torch.float32), Guarded(m, k, torch.int32)
    sizes = (e, m, e, k, 1, 1, 0, 0, 0.0, 0.0, 1.0)
    none = torch.empty(0, device=DEVICE)
    launch(desc.emit(), desc.grid(m), logits.to(DEVICE), none, weights.tensor, experts.tensor, *sizes)
    want, chosen = routing.route(logits, None, "softmax", k)
    assert_same(experts.take(k), chosen)
    assert_near(weights.take(k), want, e)


@pytest.mark.parametrize("tokens", linear_route.TOKENS)
@pytest.mark.parametrize(("e", "h"), [(60, 2048), (200, 1000), (3, 16), (1024, 200)])
def test_routers_write_nothing_else(tokens: int, e: int, h: int) -> None:
    """Experts of several groups of a thread too: their weights are loaded after the first."""
    if not architecture(arch()).clusters:
        pytest.skip("needs thread-block clusters")
    for early in (False, True):
        desc = LinearRoute(DType.F16, DType.F16, DType.F32, "softmax", False, e, h, tokens, arch(), early)
        m, k = 2 * tokens + 1, min(7, e)
        x, matrix = small_integers(m, e, h)
        weights, experts = Guarded(m, k, torch.float32), Guarded(m, k, torch.int32)
        rows, sizes = strided(x.half(), h + 8), (h + 8, m, k, 1, 1, 0, 0, 0.0, 0.0, 1.0)
        none, given = torch.empty(0, device=DEVICE), matrix.half().to(DEVICE)
        torch.cuda.synchronize()
        launch(desc.emit(), desc.grid(m), rows, given, none, weights.tensor, experts.tensor, *sizes)
        want, chosen = routing.route(x @ matrix.t(), None, "softmax", k)
        assert_same(experts.take(k), chosen)
        assert_near(weights.take(k), want, e)


@pytest.mark.parametrize("routes", [40, 300, 5000])
def test_tiles_write_nothing_else(routes: int) -> None:
    desc, count, tile = SortRoutes.for_routes(routes, arch()), 40, 64
    experts, tiles = random_experts(routes, 1, count), routing.tile_count(routes, count, tile)
    tile_experts, tile_routes = Guarded(1, tiles, torch.int32), Guarded(tiles, tile, torch.int32)
    sizes = (routes, count, tile, tiles, routing.short_tile(tile))
    launch(desc.emit(), desc.grid(count), experts.to(DEVICE), tile_experts.tensor, tile_routes.tensor, *sizes)
    for got, want in zip(
        (tile_experts.take(tiles)[0], tile_routes.take(tile)), routing.sort_routes(experts, count, tile), strict=True
    ):
        assert_same(got, want)


@pytest.mark.parametrize("aligned", [False, True])
def test_sums_write_nothing_else(aligned: bool) -> None:
    for x, many in ((x, many) for x in (DType.F16, DType.BF16, DType.F32) for many in (False, True)):
        desc, m, k, columns = SumRoutes(x, arch(), many, aligned), 3, 5, 264 if aligned else 263
        dtype = TORCH_DTYPE[x]
        results, weights, added = (
            torch.randn(m * k, columns).to(dtype),
            torch.randn(m, k),
            torch.randn(m, columns).to(dtype),
        )
        experts, y = random_experts(m, k, 20), Guarded(m, columns, dtype)
        given = [t.to(DEVICE) for t in (results, weights, experts, added)]
        launch(desc.emit(), desc.grid(m, columns), *given, y.tensor, k, 20, columns)
        assert_same(y.take(columns), routing.sum_routes(results, weights, experts, 20, added))


@pytest.mark.parametrize("m", [1, 64])
def test_one_graph_serves_all_routes(m: int) -> None:
    """Nothing is read on the host; kernels launched early see what their predecessors wrote."""
    static, x = torch.randn(m, 128, device=DEVICE), torch.randn(m * 8, 512, device=DEVICE).half()

    def mixture() -> tuple[Tensor, ...]:
        weights, experts = OPS.route(static, None, "softmax", 8, renormalize=True)
        return *OPS.sort_routes(experts, 128, 8), OPS.sum_routes(x, weights, experts, 128), experts

    mixture()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = mixture()
    for _ in range(20):
        static.copy_(torch.randn(m, 128))
        for result in results:
            result.zero_()
        graph.replay()
        for got, want in zip(results, mixture(), strict=True):
            assert_same(got, want)
        assert_same(results[-1].cpu(), routing.route(static.cpu(), None, "softmax", 8)[1])
