"""Routes of experts: what their kernels are given, and which kernel serves which sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import routing
from qcut.emitters.routing.linear_route import MAX_COLUMNS
from qcut.emitters.routing.sort_routes import FEW_ROUTES, MANY_ROUTES
from qcut.emitters.routing.sum_routes import MANY_TOKENS
from qcut.ops.routing import LinearRouteOp, RouteOp, SortRoutesOp, SumRoutesOp
from tests.backends.cuda.test_decoder import has
from tests.support.fakes.launches import A100, H200, Launches, note_launches

ROUTER = "qcut_linear_route_sm90a_"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(routing, H200, monkeypatch)


def test_routes(launches: Launches) -> None:
    logits, bias = torch.randn(5, 100)[:, :96].half(), torch.randn(96)
    wide = torch.randn(5, 100).half()[:, :96]
    weights, experts = routing.route(RouteOp(wide, bias, "sigmoid", 6, 8, 4, "top2", True, 1e-20, 0.5, 2.5))
    has(launches[-1], logits=wide, bias=bias, weights=weights, experts=experts, stride=100, m=5, count=96, top_k=6)
    has(launches[-1], groups=8, top_groups=4, top2=1, renormalize=1)
    assert [launches[-1][name] for name in ("eps", "min_sum", "scaling")] == [1e-20, 0.5, 2.5]
    assert (launches[-1]["kernel"], launches[-1]["grid"]) == ("qcut_route_sm90a_f16_sigmoid_e128_s", (2, 1, 1))
    routing.route(RouteOp(logits, None, "softmax", 6))
    has(launches[-1], bias=0, groups=1, top_groups=1, top2=0, renormalize=0)
    routing.route(RouteOp(torch.randn(33, 4).t(), None, "logits", 1, 3, 3))
    has(launches[-1], stride=33, groups=3)
    routing.route(RouteOp(logits, None, "logits", 2, 4, 1, "max"))
    routing.route(RouteOp(logits, None, "logits", 2, 4, 1, "top2"))
    kernels = [launch["kernel"].removeprefix("qcut_route_sm90a_") for launch in launches[1:]]
    assert kernels == ["f16_softmax_e128", "f32_logits_e64", "f16_logits_e128", "f16_logits_e128_s"]
    assert routing.route(RouteOp(logits[:0], None, "softmax", 6))[1].shape == (0, 6)
    assert len(launches) == 5
    routing.sort_routes(SortRoutesOp(torch.zeros(40, 8, dtype=torch.int32), 60, 128))
    has(launches[-1], tile=128, short_tile=64)


def test_routers(launches: Launches) -> None:
    x, weight, bias = torch.randn(5, 104).half()[:, :96], torch.randn(60, 96).half(), torch.randn(120)[::2]
    args = (weight, torch.float16, bias.contiguous(), "sigmoid", 6, 4, 2, "top2", True, 1e-20, 0.5, 2.5)
    weights, experts = routing.linear_route(LinearRouteOp(x, *args, early_read=True))
    has(launches[-1], x=x, weight=weight, bias=args[2], weights=weights, experts=experts, stride=104, m=5, top_k=6)
    has(launches[-1], groups=4, top_groups=2, top2=1, renormalize=1)
    assert [launches[-1][name] for name in ("eps", "min_sum", "scaling")] == [1e-20, 0.5, 2.5]
    assert (launches[-1]["kernel"], launches[-1]["grid"]) == (
        f"{ROUTER}f16_f16_f16_sigmoid_60x96_t1_s_early",
        (8, 5, 1),
    )
    for m, dtype, kernel, grid in (
        (1, torch.float16, "f16_softmax_60x96_t1", 1),
        (16, torch.float16, "f16_softmax_60x96_t1", 16),
        (17, torch.float32, "f32_softmax_60x96_t2", 9),
        (33, torch.float32, "f32_softmax_60x96_t4", 9),
        (64, torch.float32, "f32_softmax_60x96_t4", 16),
    ):
        routing.linear_route(LinearRouteOp(torch.randn(m, 96).half(), weight, dtype, None, "softmax", 6))
        has(launches[-1], bias=0, m=m)
        assert (launches[-1]["kernel"], launches[-1]["grid"]) == (f"{ROUTER}f16_f16_{kernel}", (8, grid, 1))
    routing.linear_route(LinearRouteOp(x.bfloat16(), weight.float(), torch.float32, None, "softmax", 6))
    assert launches[-1]["kernel"] == f"{ROUTER}bf16_f32_f32_softmax_60x96_t1"
    assert len(launches) == 7
    assert routing.linear_route(LinearRouteOp(x[:0], *args))[1].shape == (0, 6)
    assert len(launches) == 7


def test_biases_of_logits_are_in_the_kernel(launches: Launches) -> None:
    x, weight = torch.randn(5, 96).half(), torch.randn(60, 96).half()
    for bias in (torch.randn(60).half(), torch.randn(60)):
        call = LinearRouteOp(x, weight, torch.float16, None, "logits", 4, logits_bias=bias, early_read=True)
        routing.linear_route(call)
        has(launches[-1], weight=weight, logits_bias=bias, bias=0)
        kind = "f16" if bias.dtype is torch.float16 else "f32"
        assert launches[-1]["kernel"] == f"{ROUTER}f16_f16_f16_logits_60x96_t1_early_b{kind}"
        routing.linear_route(call._replace(x=torch.randn(65, 96).half()))
        assert launches[-1]["kernel"] == "qcut_route_sm90a_f16_logits_e64"


def test_other_routers_are_a_product_and_a_choice(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(5, 96).half(), torch.randn(60, 96).half()

    def two_steps(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float16) -> None:
        routing.linear_route(LinearRouteOp(x, weight, dtype, None, "softmax", 6))
        kernel = "f32" if dtype is torch.float32 else "f16"
        assert launches[-1]["kernel"] == f"qcut_route_sm90a_{kernel}_softmax_e{1024 if len(weight) > 60 else 64}"

    two_steps(torch.randn(65, 96).half(), weight)
    two_steps(x.float(), weight.float(), torch.float32)
    two_steps(x[:, :95], weight[:, :95])
    two_steps(torch.randn(5, 97).half()[:, :96], weight)
    two_steps(torch.randn(481).half()[1:].view(5, 96), weight)
    two_steps(x, torch.randn(96, 60).half().t())
    two_steps(torch.randn(5, 2048).half(), torch.randn(1024, 2048).half())
    two_steps(torch.randn(5, MAX_COLUMNS + 8).half(), torch.randn(6, MAX_COLUMNS + 8).half())
    for gpu in (A100, replace(H200, ahead_of_time=True)):
        monkeypatch.setattr(routing, "target", lambda device, gpu=gpu: gpu)
        routing.linear_route(LinearRouteOp(x, weight, torch.float16, None, "softmax", 6))
        assert launches[-1]["kernel"].startswith("qcut_route_")


def test_tiles(launches: Launches) -> None:
    def sort(m: int, k: int) -> Tensor:
        experts = torch.zeros(k, m, dtype=torch.int32).t()
        tile_experts, tile_routes = routing.sort_routes(SortRoutesOp(experts, 60, 8))
        has(launches[-1], tile_experts=tile_experts, tile_routes=tile_routes, routes=m * k, count=60, tile=8)
        has(launches[-1], tiles=len(tile_experts), short_tile=0)
        return experts

    for routes in (1, FEW_ROUTES, FEW_ROUTES + 1, MANY_ROUTES):
        experts = sort(routes, 1)
        has(launches[-1], experts=experts)
    sort(4, 8)  # not contiguous
    kernels = [(launch["kernel"].removeprefix("qcut_sort_routes_sm90a_"), launch["grid"][0]) for launch in launches]
    assert kernels == [("few", 1), ("few", 1), ("many_t256", 60), ("many_t1024", 60), ("few", 1)]
    assert routing.sort_routes(SortRoutesOp(torch.zeros(0, 8, dtype=torch.int32), 60, 8))[1].shape == (0, 8)
    assert len(launches) == 5


def test_sums(launches: Launches) -> None:
    for m, columns, kernel, grid in (
        (3, 640, "f16", (3, 2, 1)),
        (MANY_TOKENS, 640, "f16_m", (MANY_TOKENS, 2, 1)),
        (3, 100, "f16_u", (3, 1, 1)),
    ):
        results, added = torch.randn(m * 4, columns).half(), torch.randn(m, columns).half()
        weights, experts = torch.rand(m, 4), torch.zeros(m, 4, dtype=torch.int32)
        y = routing.sum_routes(SumRoutesOp(results, weights, experts, 60, added))
        has(launches[-1], results=results, weights=weights, experts=experts, added=added, y=y)
        has(launches[-1], top_k=4, count=60, columns=columns)
        assert (launches[-1]["kernel"], launches[-1]["grid"]) == (f"qcut_sum_routes_sm90a_{kernel}", grid)
    routing.sum_routes(SumRoutesOp(results, weights, experts, 60))
    has(launches[-1], added=0)
    odd = torch.randn(12 * 640 + 1).half()[1:].view(12, 640)
    routing.sum_routes(SumRoutesOp(odd, weights, experts, 60))
    assert launches[-1]["kernel"].endswith("_u")
    assert routing.sum_routes(SumRoutesOp(odd[:0], weights[:0], experts[:0], 60)).shape == (0, 640)
    assert len(launches) == 5
