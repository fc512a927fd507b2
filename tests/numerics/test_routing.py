"""Routes: the routers of transformers, a naive sort into tiles, sums in order, at the edges of every size."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from qcut.numerics.routing import GROUP_SCORES, SCORES, route, sort_routes, sum_routes, tile_count
from tests.support.oracles import FLOATS

HIDDEN, EXPERTS, TOP_K = 48, 24, 5
GROUPED = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
LIMITED: dict[str, Any] = {"groups": 4, "top_groups": 2}
DEEPSEEK = LIMITED | {"group_score": "top2", "renormalize": True, "eps": 1e-20, "scaling": 2.5}
ROUTERS: tuple[tuple[Any, str, dict[str, Any], str, dict[str, Any]], ...] = (
    (Qwen3MoeTopKRouter, "qwen3_moe", {"norm_topk_prob": True}, "softmax", {"renormalize": True}),
    (OlmoeTopKRouter, "olmoe", {"norm_topk_prob": False}, "softmax", {}),
    (MixtralTopKRouter, "mixtral", {}, "softmax", {"renormalize": True}),
    (HunYuanMoEV1Gate, "hunyuan_v1_moe", {"moe_topk": TOP_K}, "softmax", {"renormalize": True}),
    (GraniteMoeTopKRouter, "granitemoe", {}, "logits", {}),
    (Ernie4_5_MoeTopKRouter, "ernie4_5_moe", {"moe_norm_min": 0.1}, "softmax", {"renormalize": True, "min_sum": 0.1}),
    (DeepseekV2TopkRouter, "deepseek_v2", {"topk_method": "greedy"}, "softmax", {}),
    (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", **GROUPED},
        "softmax",
        {**LIMITED, "scaling": 2.5},
    ),
    (DeepseekV3TopkRouter, "deepseek_v3", GROUPED, "sigmoid", DEEPSEEK),
    (Glm4MoeTopkRouter, "glm4_moe", GROUPED, "sigmoid", DEEPSEEK),
    (MiniMaxM2TopKRouter, "minimax_m2", {}, "sigmoid", {"renormalize": True}),
    (Lfm2MoeTopKRouter, "lfm2_moe", {"norm_topk_prob": True}, "sigmoid", {"renormalize": True, "eps": 1e-6}),
    (AfmoeTokenChoiceRouter, "afmoe", {"route_scale": 1.5}, "sigmoid", {"renormalize": True, "scaling": 1.5}),
)


def built(kind: Any, model_type: str, options: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """A router with random weights, and the bias that it adds to scores."""
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    config = AutoConfig.for_model(model_type)
    for name, value in {"n_routed_experts": EXPERTS, **sizes, **options}.items():
        setattr(config, name, value)
    router = kind(config)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    bias = getattr(router, "e_score_correction_bias", None)
    if model_type == "ernie4_5_moe":
        bias = router.moe_statics.e_score_correction_bias
    if model_type in ("minimax_m2", "lfm2_moe", "afmoe"):
        bias = torch.empty(EXPERTS)
    return router, None if bias is None else torch.nn.init.normal_(bias, std=0.3).detach().flatten()


@pytest.mark.parametrize(("kind", "model_type", "options", "scores", "arguments"), ROUTERS)
@torch.no_grad()
def test_routes_are_those_of_transformers(
    kind: Any, model_type: str, options: dict[str, Any], scores: str, arguments: dict[str, Any]
) -> None:
    router, bias = built(kind, model_type, options)
    given = (bias,) if model_type in ("minimax_m2", "lfm2_moe", "afmoe") else ()
    x = 0.2 * torch.randn(301, HIDDEN)
    logits, weights, experts = router(x[None] if model_type == "afmoe" else x, *given)
    got, chosen = route(logits, bias, scores, TOP_K, **arguments)
    # transformers leaves the order of some choices to torch.
    order, expected = chosen.argsort(1), experts.argsort(1)
    assert torch.equal(chosen.long().gather(1, order), experts.gather(1, expected))
    torch.testing.assert_close(got.gather(1, order), weights.gather(1, expected), rtol=EXPERTS * 2.0**-22, atol=0.0)


def naive(choice: list[float], top_k: int, groups: int, top_groups: int, group_score: str) -> list[int]:
    """The experts by sorting Python's tuples."""

    def key(value: float, index: int) -> tuple[bool, float, int]:
        return math.isnan(value), 0.0 if math.isnan(value) else -value, index

    size = len(choice) // groups
    ranked = []
    for g in range(groups):
        part = sorted(choice[g * size : (g + 1) * size], key=lambda v: key(v, 0))
        ranked.append(part[0] if group_score == "max" else part[0] + part[1])
    best = sorted(range(groups), key=lambda g: key(ranked[g], g))[:top_groups]
    allowed = [e for e in range(len(choice)) if e // size in best]
    return sorted(allowed, key=lambda e: key(choice[e], e))[:top_k]


@pytest.mark.parametrize("group_score", GROUP_SCORES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_choice_with_ties_is_a_naive_sort(dtype: torch.dtype, group_score: str) -> None:
    logits = torch.randint(-3, 4, (400, 24)).to(dtype)
    logits[torch.rand(logits.shape) < 0.05] = math.nan
    logits[torch.rand(logits.shape) < 0.05] = -math.inf
    logits[logits == 1] = -0.0
    logits[0] = math.nan
    bias = torch.randint(-1, 2, (24,)).float()
    for groups, top_groups, top_k in ((1, 1, 7), (1, 1, 24), (4, 2, 5), (4, 2, 12), (12, 3, 6), (8, 8, 3)):
        for added in (None, bias):
            _, experts = route(logits, added, "logits", top_k, groups, top_groups, group_score)
            choice = (logits.float() if added is None else logits.float() + added).tolist()
            expected = [naive(row, top_k, groups, top_groups, group_score) for row in choice]
            assert experts.tolist() == expected


@pytest.mark.parametrize("scores", SCORES)
def test_choice_without_bias_is_that_of_logits(scores: str) -> None:
    """Rounded scores of these logits are equal."""
    logits = torch.tensor([[30.0, 31.0, 32.0, 33.0], [-200.0, 0.0, -190.0, -195.0]])
    weights, experts = route(logits, None, scores, 3)
    assert experts.tolist() == [[3, 2, 1], [1, 2, 3]]
    assert weights.dtype is torch.float32


def test_weights_sum_in_order_and_are_scaled_last() -> None:
    logits = torch.randn(50, 40)
    plain, _ = route(logits, None, "sigmoid", 9)
    scaled, _ = route(logits, None, "sigmoid", 9, renormalize=True, eps=0.25, min_sum=8.0, scaling=3.0)
    for row, expected in zip(plain, scaled, strict=True):
        total = torch.zeros(())
        for weight in row:
            total = total + weight
        assert torch.equal(row / max(total + 0.25, torch.tensor(8.0)) * 3.0, expected)


def test_nan_makes_the_weights_of_its_row_nan() -> None:
    logits = torch.zeros(2, 6)
    logits[0, 1] = math.nan
    weights, experts = route(logits, None, "softmax", 2, renormalize=True, min_sum=0.5)
    assert experts.tolist() == [[0, 2], [0, 1]]
    assert weights.isnan().tolist() == [[True, True], [False, False]]


# ── tiles ────────────────────────────────────────────────────────────────────────────────────────


def naive_tiles(experts: list[int], count: int, tile: int) -> tuple[list[int], list[list[int]]]:
    """Experts and routes of the used tiles. Of those of more than 32 routes, tiles at most half filled lie evenly."""
    tile_experts, tile_routes = [], []
    for e in range(count):
        mine = [r for r, expert in enumerate(experts) if expert == e]
        for first in range(0, len(mine), tile):
            part = mine[first : first + tile]
            tile_experts.append(e)
            tile_routes.append(part + [-1] * (tile - len(part)))
    if tile > 32:
        is_short = [2 * sum(r >= 0 for r in routes) <= tile for routes in tile_routes]
        longs, shorts = ([i for i, short in enumerate(is_short) if short == kind] for kind in (False, True))
        order: list[int] = []
        taken = 0
        for i in (*longs, None):
            while taken < len(shorts) and (taken + 1) * len(longs) <= (len(order) - taken) * len(shorts):
                order.append(shorts[taken])
                taken += 1
            order += [] if i is None else [i]
        return [tile_experts[i] for i in order], [tile_routes[i] for i in order]
    return tile_experts, tile_routes


def test_tiles_are_a_naive_sort() -> None:
    generator = random.Random(0)
    shapes = [(0, 3, 4, 8), (1, 1, 1, 1), (1, 8, 128, 8), (5, 2, 3, 1), (33, 4, 1, 16), (64, 8, 60, 8), (7, 1, 999, 64)]
    shapes += [(300, 1, 6, 32), (300, 1, 6, 33), (300, 2, 6, 128), (512, 8, 20, 256)]
    for _ in range(60):
        m, k, count, tile = (generator.randint(1, n) for n in (40, 8, 20, 20))
        shapes.append((m, k, count, tile))
    for m, k, count, tile in shapes:
        # Skewed, with routes of other processes below and above.
        experts = torch.randint(-2, count + 3, (m, k)).where(torch.rand(m, k) < 0.7, count // 2).int()
        tile_experts, tile_routes = sort_routes(experts, count, tile)
        expected, routes = naive_tiles(experts.flatten().tolist(), count, tile)
        unused = tile_count(m * k, count, tile) - len(expected)
        assert unused >= 0
        assert tile_experts.tolist() == expected + [-1] * unused
        assert tile_routes.tolist() == routes + [[-1] * tile] * unused
        assert (tile_experts.dtype, tile_routes.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize(("routes", "count", "tile"), [(1, 9, 4), (8, 128, 8), (40, 5, 8), (9, 2, 4)])
def test_tiles_suffice_for_the_worst_distribution(routes: int, count: int, tile: int) -> None:
    """As many experts as possible begin a tile with one route."""
    begun = min(count, routes)
    worst = begun + (routes - begun) // tile
    assert worst <= tile_count(routes, count, tile) <= worst + 1
    experts = torch.tensor([*range(begun), *[0] * (routes - begun)], dtype=torch.int32)[:, None]
    tile_experts, tile_routes = sort_routes(experts, count, tile)
    assert sorted(tile_routes[tile_routes >= 0].tolist()) == list(range(routes))
    assert int((tile_experts >= 0).sum()) == worst


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_in_order_and_rounded_once(dtype: torch.dtype) -> None:
    m, k, h, count = 9, 6, 13, 4
    results, weights = torch.randn(m * k, h).to(dtype), torch.randn(m, k)
    experts = torch.randint(-1, count + 1, (m, k)).int()
    experts[3] = count
    added = torch.randn(m, h).to(dtype)
    is_computed = ((experts >= 0) & (experts < count)).tolist()
    results[[r for r in range(m * k) if not is_computed[r // k][r % k]]] = math.nan
    y = sum_routes(results, weights, experts, count, None)
    for i in range(m):
        total = torch.zeros(h)
        for j in range(k):
            if is_computed[i][j]:
                total = total + weights[i, j] * results[i * k + j].float()
        assert torch.equal(y[i], total.to(dtype))
    assert not y[3].any()
    assert torch.equal(sum_routes(results, weights, experts, count, added), y + added)
    assert sum_routes(results[:0], weights[:0], experts[:0], count, added[:0]).shape == (0, h)
