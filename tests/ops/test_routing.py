"""Operators of routes: registration, sizes at the edges, one graph for all numbers of tokens, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.numerics import routing
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut
CALLS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("softmax", 4, {}),
    ("sigmoid", 3, {"groups": 4, "top_groups": 2, "group_score": "top2", "renormalize": True, "eps": 1e-20}),
    ("logits", 12, {"scaling": 2.0}),
    ("softmax", 1, {"groups": 3, "top_groups": 1, "renormalize": True, "min_sum": 0.1}),
)


def routed(m: int = 6, k: int = 3) -> tuple[Tensor, Tensor]:
    """Weights and experts; some experts lie outside 0 to 4."""
    return torch.rand(m, k), torch.randint(-1, 7, (m, k), dtype=torch.int32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("scores", "top_k", "options"), CALLS)
@pytest.mark.parametrize("m", [0, 1, 6])
def test_opcheck_of_routes(scores: str, top_k: int, options: dict[str, Any], m: int) -> None:
    bias = torch.randn(24)[::2]
    for logits, added in ((torch.randn(m, 12), None), (torch.randn(12, m).half().t(), bias)):
        torch.library.opcheck(OPS.route.default, (logits, added, scores, top_k), options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("scores", "top_k", "options"), CALLS)
@pytest.mark.parametrize("m", [0, 1, 6])
def test_opcheck_of_routers(scores: str, top_k: int, options: dict[str, Any], m: int) -> None:
    for x, weight, dtype, bias in (
        (torch.randn(m, 20), torch.randn(12, 20), torch.float32, None),
        (torch.randn(20, m).half().t(), torch.randn(20, 12).half().t(), torch.float16, torch.randn(24)[::2]),
        (torch.randn(m, 20).half(), torch.randn(12, 20), torch.float32, torch.randn(12)),
    ):
        overloads = (OPS.linear_route.default, OPS.linear_route.early_read)
        for overload in overloads if bias is None else overloads[:1]:
            torch.library.opcheck(overload, (x, weight, dtype, bias, scores, top_k), options)
            more = options | {"logits_bias": torch.randn(12).to(weight.dtype)}
            torch.library.opcheck(overload, (x, weight, dtype, bias, scores, top_k), more)


@pytest.mark.parametrize("x", FLOATS)
@pytest.mark.parametrize("weight", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_routers_are_torchs_logits_and_their_route(x: torch.dtype, weight: torch.dtype, dtype: torch.dtype) -> None:
    tokens, matrix, bias = torch.randn(6, 20).to(x), torch.randn(12, 20).to(weight), torch.randn(12)
    if weight not in (x, torch.float32) or dtype not in (weight, torch.float32):
        with pytest.raises(errors.DtypeError, match=r"linear_route: (weight|logits_dtype) is"):
            OPS.linear_route(tokens, matrix, dtype, bias, "softmax", 2)
        return
    for scores, top_k, options in CALLS:
        args = (bias, scores, top_k)
        want = OPS.route(F.linear(tokens.to(dtype), matrix.to(dtype)), *args, **options)
        for overload in (OPS.linear_route, OPS.linear_route.early_read):
            got = overload(tokens, matrix, dtype, *args, **options)
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("in_float32", [False, True])
def test_logits_biases_are_added_before_rounding(dtype: torch.dtype, in_float32: bool) -> None:
    """Sums are exact: the bias is added to them, and the sum rounded once."""
    tokens, matrix = (torch.randint(-8, 9, shape).to(dtype) for shape in ((50, 96), (12, 96)))
    logits_dtype = torch.float32 if in_float32 else dtype
    for bias in (torch.linspace(-90, 90, 12).to(dtype), torch.linspace(-90, 90, 12)):
        logits = (tokens.double() @ matrix.double().t() + bias.double()).float().to(logits_dtype)
        want = OPS.route(logits, None, "logits", 4)
        for overload in (OPS.linear_route, OPS.linear_route.early_read):
            got = overload(tokens, matrix, logits_dtype, None, "logits", 4, logits_bias=bias)
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_routers_with_biases_are_those_of_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=48, num_local_experts=16, num_experts_per_tok=4)
    router, x = GptOssTopKRouter(config), torch.randn(9, 48)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    with torch.no_grad():
        _, scores, indices = router(x)
        weights, experts = OPS.linear_route(x, router.weight, torch.float32, None, "logits", 4, logits_bias=router.bias)
    assert torch.equal(experts.long(), indices)
    torch.testing.assert_close(weights, scores)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("m", [0, 1, 6])
def test_opcheck_of_tiles_and_sums(m: int) -> None:
    weights, experts = routed(m)
    for count, tile in ((5, 4), (1, 1), (1024, 8)):
        torch.library.opcheck(OPS.sort_routes.default, (experts, count, tile))
    turned = experts.t().contiguous().t()
    torch.library.opcheck(OPS.sort_routes.default, (turned, 5, 4))
    for dtype in FLOATS:
        results = torch.randn(3 * m, 10).to(dtype)
        torch.library.opcheck(OPS.sum_routes.default, (results, weights, experts, 5))
        torch.library.opcheck(OPS.sum_routes.default, (results, weights, turned, 5, torch.randn(10, m).to(dtype).t()))


def test_strides_do_not_matter() -> None:
    weights, experts = routed()
    logits, bias, results, added = torch.randn(6, 12), torch.randn(12), torch.randn(18, 7), torch.randn(6, 7)

    def strided(t: Tensor) -> Tensor:
        return torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 3, dtype=t.dtype)[..., 3::2].copy_(t)

    for op, args in (
        (OPS.route, (logits, bias, "sigmoid", 4)),
        (OPS.linear_route, (logits.round(), torch.randn(5, 12).round(), torch.float32, None, "softmax", 4)),
        (OPS.sort_routes, (experts, 5, 4)),
        (OPS.sum_routes, (results, weights, experts, 5, added)),
    ):
        got = op(*(strided(a) if isinstance(a, Tensor) else a for a in args))
        expected = op(*args)
        for one, other in zip(*((t,) if isinstance(t, Tensor) else t for t in (got, expected)), strict=True):
            assert torch.equal(one, other)
            assert one.is_contiguous()


def test_one_expert_takes_every_token() -> None:
    weights, experts = OPS.route(torch.randn(3, 1), None, "softmax", 1)
    assert weights.tolist() == [[1.0]] * 3
    assert not experts.any()
    tile_experts, tile_routes = OPS.sort_routes(experts, 1, 2)
    assert tile_experts.tolist() == [0, 0]
    assert tile_routes.tolist() == [[0, 1], [2, -1]]


@torch.no_grad()
def test_compile_one_graph_for_every_number_of_tokens() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    router = torch.randn(16, 10)

    def mixture(logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, _ = OPS.route(logits, None, "softmax", 3, renormalize=True)
        _, experts = OPS.linear_route(x, router, torch.float32, None, "softmax", 3)
        tile_experts, tile_routes = OPS.sort_routes(experts, 16, 8)
        return OPS.sum_routes(x.repeat_interleave(3, 0), weights, experts, 16, x), tile_experts + 1, tile_routes + 1

    compiled = torch.compile(mixture, fullgraph=True, dynamic=True, backend=backend)
    for m in (5, 2, 33):
        given = torch.randn(m, 16), torch.randn(m, 10)
        for got, expected in zip(compiled(*given), mixture(*given), strict=True):
            assert torch.equal(got, expected)
    assert len(graphs) == 1


def test_shapes_are_known_without_values() -> None:
    experts = torch.empty(7, 3, dtype=torch.int32, device="meta")
    tile_experts, tile_routes = OPS.sort_routes(experts, 5, 4)
    assert (tile_experts.shape, tile_routes.shape) == ((routing.tile_count(21, 5, 4),), (9, 4))


def test_route_refuses() -> None:
    logits = torch.zeros(2, 12)

    def refused(error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=f"qcut::route: {match}"):
            OPS.route(*args, **options)

    refused(errors.DtypeError, "logits is int64; allowed: float16", logits.long(), None, "softmax", 2)
    refused(errors.ShapeError, r"logits have shape \[12\]; allowed: \[M, E\], E of 1 to 1024", logits[0], None, "x", 2)
    refused(errors.ShapeError, r"logits have shape \[2, 1025\]", torch.zeros(2, 1025), None, "softmax", 2)
    refused(errors.ShapeError, r"bias has shape \[11\]", logits, torch.zeros(11), "softmax", 2)
    refused(errors.DtypeError, "bias is float16", logits, torch.zeros(12).half(), "softmax", 2)
    refused(errors.ConfigError, "scores are 'relu'; allowed: softmax, sigmoid, logits", logits, None, "relu", 2)
    for top_k in (0, 13):
        refused(errors.ConfigError, f"top_k is {top_k} of 12 experts; allowed: 1 to 12", logits, None, "logits", top_k)
    refused(errors.ConfigError, "top_k is 33 of 99 experts; allowed: 1 to 32", torch.zeros(2, 99), None, "logits", 33)
    for groups in (0, 5, 36):
        refused(errors.ConfigError, f"groups are {groups}; allowed: 1 to 32, a", logits, None, "logits", 2, groups)
    for top_groups in (1, 5):
        message = f"top_groups are {top_groups}; allowed: 2, which have 5 experts, to 4"
        refused(errors.ConfigError, message, logits, None, "logits", 5, 4, top_groups)
    refused(errors.ConfigError, "group_score is 'sum'", logits, None, "logits", 2, 4, 2, "sum")
    refused(
        errors.ConfigError, "group_score is 'top2' for groups of 1 expert", logits, None, "logits", 2, 12, 2, "top2"
    )
    for value in (-1.0, math.inf, math.nan):
        refused(errors.ConfigError, f"eps is {value}", logits, None, "logits", 2, eps=value)
        refused(errors.ConfigError, f"min_sum is {value}", logits, None, "logits", 2, min_sum=value)
    refused(errors.ConfigError, "scaling is inf", logits, None, "logits", 2, scaling=math.inf)


def test_routers_refuse() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(12, 8)

    def refused(error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=f"qcut::linear_route: {match}"):
            OPS.linear_route(*args, **options)

    f16, f32 = torch.float16, torch.float32
    refused(errors.DtypeError, "x is int64; allowed: float16", x.long(), weight, f32, None, "softmax", 2)
    refused(errors.ShapeError, r"x has shape \[8\]; allowed: \[M, H\] with", x[0], weight, f32, None, "softmax", 2)
    refused(errors.ShapeError, r"x has shape \[2, 0\]", x[:, :0], weight[:, :0], f32, None, "softmax", 2)
    for given, found in ((weight[0], r"\[8\]"), (weight[:0], r"\[0, 8\]"), (torch.zeros(1025, 8), r"\[1025, 8\]")):
        message = rf"weight has shape {found}; allowed: \[E, 8\], E of 1 to 1024"
        refused(errors.ShapeError, message, x, given, f32, None, "softmax", 2)
    refused(errors.ShapeError, r"weight has shape \[12, 7\]", x, weight[:, :7], f32, None, "softmax", 2)
    refused(errors.DtypeError, "weight is float16; allowed: float32", x, weight.half(), f32, None, "softmax", 2)
    refused(errors.DtypeError, "logits_dtype is float16; allowed: float32", x.half(), weight, f16, None, "softmax", 2)
    refused(errors.ShapeError, r"bias has shape \[11\]", x, weight, f32, torch.zeros(11), "softmax", 2)
    refused(errors.ConfigError, "scores are 'relu'", x, weight, f32, None, "relu", 2)
    refused(errors.ConfigError, "top_k is 13 of 12 experts", x, weight, f32, None, "softmax", 13)
    refused(errors.ConfigError, "scaling is nan", x, weight, f32, None, "softmax", 2, scaling=math.nan)
    with pytest.raises(errors.DeviceError, match="linear_route: weight is on meta"):
        OPS.linear_route(x, weight.to("meta"), f32, None, "softmax", 2)


def test_tiles_and_sums_refuse() -> None:
    weights, experts = routed()
    results = torch.zeros(18, 5)
    with pytest.raises(errors.DtypeError, match="sort_routes: experts is int64; allowed: int32"):
        OPS.sort_routes(experts.long(), 5, 4)
    with pytest.raises(errors.ShapeError, match=r"sort_routes: experts have shape \[6\]; allowed: \[M, k\]"):
        OPS.sort_routes(experts[:, 0], 5, 4)
    for count in (0, 1025):
        with pytest.raises(errors.ConfigError, match=f"sort_routes: count is {count}; allowed: 1 to 1024"):
            OPS.sort_routes(experts, count, 4)
        with pytest.raises(errors.ConfigError, match=f"sum_routes: count is {count}; allowed: 1 to 1024"):
            OPS.sum_routes(results, weights, experts, count)
    for tile in (0, 1025):
        with pytest.raises(errors.ConfigError, match=f"sort_routes: tile is {tile}; allowed: 1 to 1024"):
            OPS.sort_routes(experts, 5, tile)
    with pytest.raises(errors.ShapeError, match="in 2147483648 tiles of 1; allowed: 1073741824 positions"):
        OPS.sort_routes(torch.empty(2**22, 512, dtype=torch.int32, device="meta"), 5, 1)
    with pytest.raises(errors.DtypeError, match="sum_routes: results is int32"):
        OPS.sum_routes(results.int(), weights, experts, 5)
    with pytest.raises(errors.ShapeError, match=r"sum_routes: results have shape \[17, 5\]; allowed: \[18, H\]"):
        OPS.sum_routes(results[1:], weights, experts, 5)
    with pytest.raises(errors.ShapeError, match=r"sum_routes: weights has shape \[6, 2\]; allowed: \[6, 3\]"):
        OPS.sum_routes(results, weights[:, 1:], experts, 5)
    with pytest.raises(errors.DtypeError, match="sum_routes: added is float16; allowed: float32"):
        OPS.sum_routes(results, weights, experts, 5, torch.zeros(6, 5).half())
    with pytest.raises(errors.ShapeError, match=r"sum_routes: added has shape \[6, 4\]; allowed: \[6, 5\]"):
        OPS.sum_routes(results, weights, experts, 5, torch.zeros(6, 4))
