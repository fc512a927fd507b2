"""`qcut.ops.routing` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import is_aligned
from qcut.emitters.routing.route import RouteTokens, slots_for
from qcut.emitters.routing.sort_routes import SortRoutes
from qcut.emitters.routing.sum_routes import MANY_TOKENS, SumRoutes
from qcut.ops.registry import serves
from qcut.ops.routing import RouteOp, SortRoutesOp, SumRoutesOp


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
    key = (logits.dtype, call.scores, slots_for(count), call.compares_scores, device)
    plan = _route_plans[key]
    pointers = (logits.data_ptr(), 0 if bias is None else bias.data_ptr(), weights.data_ptr(), experts.data_ptr())
    sizes = (logits.stride(0), m, count, call.top_k, call.groups, call.top_groups, int(call.group_score == "top2"))
    numbers = (int(call.renormalize), call.eps, call.min_sum, call.scaling)
    plan.launch(m, (*pointers, *sizes, *numbers), current_stream(device))
    return weights, experts


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
    plan.launch(call.count, (*pointers, routes, call.count, call.tile, len(tile_experts)), current_stream(device))
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
def _sort_plans(desc: SortRoutes, device: int) -> LaunchPlan:
    return LaunchSpec(desc.emit(), desc.grid, pdl=pdl(device)).load(device)


@PlanCache
def _sum_plans(dtype: torch.dtype, many: bool, aligned: bool, columns: int, device: int) -> LaunchPlan:
    desc = SumRoutes(DTYPES[dtype], target(device).arch, many, aligned)
    return LaunchSpec(desc.emit(), lambda m: desc.grid(m, columns), pdl=pdl(device)).load(device)
