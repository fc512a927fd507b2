"""`qcut.ops.routing` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import is_aligned, row_major
from qcut.dispatch.gpus import Target
from qcut.emitters.routing.linear_route import CTAS, MAX_COLUMNS, TOKENS, LinearRoute
from qcut.emitters.routing.route import RouteTokens, slots_for
from qcut.emitters.routing.sort_routes import SortRoutes
from qcut.emitters.routing.sum_routes import MANY_TOKENS, SumRoutes
from qcut.numerics.routing import short_tile
from qcut.ops.registry import serves
from qcut.ops.routing import LinearRouteOp, RouteOp, SortRoutesOp, SumRoutesOp, compares_scores

MOST_ROUTER_BYTES = 2 << 20
"""Bytes of a router's weight up to which one cluster reads it: 64 bytes a cycle each of its multiprocessors, 2 µs for
all, which is what the second launch takes."""


@serves(RouteOp)
def route(call: RouteOp) -> tuple[Tensor, Tensor]:
    call.check()
    weights, experts = call.fake()
    m, count = call.logits.shape
    if m == 0:
        return weights, experts
    logits = call.logits if call.logits.stride(1) == 1 else call.logits.contiguous()
    bias = None if call.bias is None else call.bias.contiguous()
    device = logits.get_device()
    key = (logits.dtype, call.scores, slots_for(count), compares_scores(call), device)
    plan = _route_plans[key]
    pointers = (logits.data_ptr(), 0 if bias is None else bias.data_ptr(), weights.data_ptr(), experts.data_ptr())
    plan.launch(m, (*pointers, logits.stride(0), m, count, *_options(call)), current_stream(device))
    return weights, experts


@serves(LinearRouteOp)
def linear_route(call: LinearRouteOp) -> tuple[Tensor, Tensor]:
    call.check()
    m, (count, columns), weight = call.x.shape[0], call.weight.shape, call.weight
    device = weight.get_device()
    x, stride = row_major(call.x)
    tokens = _router_tokens(x, stride, weight, target(device))
    if tokens is None:
        return route(call.route)
    weights, experts = call.fake()
    if m == 0:
        return weights, experts
    bias = None if call.bias is None else call.bias.contiguous()
    types, shape = (x.dtype, weight.dtype, call.logits_dtype), (count, columns, tokens)
    logits_bias = None if call.logits_bias is None else call.logits_bias.contiguous()
    added = None if logits_bias is None else logits_bias.dtype
    plan = _router_plans[(*types, call.scores, compares_scores(call), *shape, call.early_read, added, device)]
    given = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    pointers = (*given, weights.data_ptr(), experts.data_ptr())
    last = () if logits_bias is None else (logits_bias.data_ptr(),)
    plan.launch(m, (*pointers, stride, m, *_options(call), *last), current_stream(device))
    return weights, experts


def _options(call: RouteOp | LinearRouteOp) -> tuple[int | float, ...]:
    """The options of a choice, as kernels take them."""
    groups = (call.top_k, call.groups, call.top_groups, int(call.group_score == "top2"))
    return (*groups, int(call.renormalize), call.eps, call.min_sum, call.scaling)


def _router_tokens(x: Tensor, stride: int, weight: Tensor, gpu: Target) -> int | None:
    """Tokens of a cluster, if all clusters run at once and one kernel serves the router; else None.

    More tokens would multiply on CUDA cores what torch multiplies on tensor cores.
    """
    (m, columns), tokens = x.shape, -(-x.shape[0] // (gpu.sm_count // CTAS))
    if not gpu.exchanges_in_clusters or gpu.ahead_of_time or x.dtype is torch.float32 or tokens > TOKENS[-1]:
        return None
    if weight.nbytes > MOST_ROUTER_BYTES or columns > MAX_COLUMNS or columns % 8 or not weight.is_contiguous():
        return None
    aligned = is_aligned(x, weight) and (m == 1 or stride % 8 == 0)
    return next(size for size in TOKENS if size >= tokens) if aligned else None


@serves(SortRoutesOp)
def sort_routes(call: SortRoutesOp) -> tuple[Tensor, Tensor]:
    call.check()
    tile_experts, tile_routes = call.fake()
    routes = call.experts.numel()
    if routes == 0:
        return tile_experts, tile_routes
    experts = call.experts.contiguous()
    device = experts.get_device()
    plan = _sort_plans[SortRoutes.for_routes(routes, target(device).arch), device]
    pointers = (t.data_ptr() for t in (experts, tile_experts, tile_routes))
    sizes = (routes, call.count, call.tile, len(tile_experts), short_tile(call.tile))
    plan.launch(call.count, (*pointers, *sizes), current_stream(device))
    return tile_experts, tile_routes


@serves(SumRoutesOp)
def sum_routes(call: SumRoutesOp) -> Tensor:
    call.check()
    y = call.fake()
    m, columns = y.shape
    if m == 0:
        return y
    results, weights, experts = call.results.contiguous(), call.weights.contiguous(), call.experts.contiguous()
    added = None if call.added is None else call.added.contiguous()
    device = results.get_device()
    aligned = is_aligned(results, added) and columns * results.element_size() % 16 == 0
    plan = _sum_plans[results.dtype, m >= MANY_TOKENS, aligned, columns, device]
    given = (results.data_ptr(), weights.data_ptr(), experts.data_ptr(), 0 if added is None else added.data_ptr())
    plan.launch(m, (*given, y.data_ptr(), experts.shape[1], call.count, columns), current_stream(device))
    return y


@PlanCache
def _route_plans(dtype: torch.dtype, scores: str, slots: int, by_score: bool, device: int) -> LaunchPlan:
    desc = RouteTokens(DTYPES[dtype], scores, slots, by_score, target(device).arch)
    return LaunchSpec(desc.emit(), desc.grid, pdl=pdl(device)).load(device)


@PlanCache
def _router_plans(
    x: torch.dtype,
    weight: torch.dtype,
    logits: torch.dtype,
    scores: str,
    by_score: bool,
    count: int,
    columns: int,
    tokens: int,
    early_read: bool,
    logits_bias: torch.dtype | None,
    device: int,
) -> LaunchPlan:
    types, arch = (DTYPES[x], DTYPES[weight], DTYPES[logits]), target(device).arch
    added = None if logits_bias is None else DTYPES[logits_bias]
    desc = LinearRoute(*types, scores, by_score, count, columns, tokens, arch, early_read, added)
    return LaunchSpec(desc.emit(), desc.grid, pdl=pdl(device)).load(device)


@PlanCache
def _sort_plans(desc: SortRoutes, device: int) -> LaunchPlan:
    return LaunchSpec(desc.emit(), desc.grid, pdl=pdl(device)).load(device)


@PlanCache
def _sum_plans(dtype: torch.dtype, many: bool, aligned: bool, columns: int, device: int) -> LaunchPlan:
    desc = SumRoutes(DTYPES[dtype], target(device).arch, many, aligned)
    return LaunchSpec(desc.emit(), lambda m: desc.grid(m, columns), pdl=pdl(device)).load(device)
