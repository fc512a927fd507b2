"""Rows of the conformance suite: the kernels between a router and its experts."""

from __future__ import annotations

from collections.abc import Iterator

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.routing import linear_route, route, sort_routes, sum_routes
from qcut.emitters.routing.linear_route import MAX_COLUMNS, TOKENS, LinearRoute
from qcut.emitters.routing.route import RouteTokens
from qcut.emitters.routing.sort_routes import FEW_ROUTES, MOST_THREADS, SortRoutes
from qcut.emitters.routing.sum_routes import SumRoutes
from tests.emitters.conformance.row import Row

ARCH = "sm_90a"
F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
FLOATS = (F16, BF16, F32)


def routers(arch: str) -> Iterator[KernelSource]:
    """Both choices of every kind of scores, for the most experts too, and every number of experts of a lane."""
    for scores in route.SCORES:
        for x, slots in ((F32, 4), (BF16, 32)):
            yield from (RouteTokens(x, scores, slots, by_score, arch).emit() for by_score in (False, True))
    yield from (RouteTokens(F16, "softmax", slots, False, arch).emit() for slots in route.SLOTS)


def linear_routers(arch: str) -> Iterator[KernelSource]:
    """Weights that threads hold at once, and in parts; columns of some threads, and several of each."""
    if not architecture(arch).clusters:
        return
    for tokens in TOKENS:
        yield LinearRoute(BF16, BF16, BF16, "softmax", False, 128, 2048, tokens, arch, True).emit()
        yield LinearRoute(F16, F16, F16, "sigmoid", True, 128, 4096, tokens, arch, True).emit()
        yield LinearRoute(BF16, F32, F32, "softmax", True, 64, 2560, tokens, arch).emit()
        yield LinearRoute(BF16, F32, F32, "softmax", False, 64, 4096, tokens, arch, True).emit()
        yield LinearRoute(F16, F16, F32, "logits", True, 60, 8192, tokens, arch, True).emit()
        yield LinearRoute(BF16, BF16, BF16, "logits", False, 128, 2880, tokens, arch, True, BF16).emit()
        yield LinearRoute(BF16, F32, F32, "logits", tokens > 1, 32, 2880, tokens, arch, bias=F32).emit()
    yield LinearRoute(F16, F16, F16, "sigmoid", True, 1000, 1000, 2, arch, bias=F32).emit()
    yield LinearRoute(F16, F16, F16, "logits", False, 8, 4096, 1, arch).emit()
    yield LinearRoute(BF16, BF16, BF16, "sigmoid", True, 1000, 1000, 4, arch).emit()


def linear_instructions(source: KernelSource) -> Iterator[str]:
    """Sums in float32; logits go to the shared memory of other CTAs."""
    yield from ("FFMA", "!HMMA", "STAS", "REDUX")


def sorts(arch: str) -> Iterator[KernelSource]:
    yield from (SortRoutes.for_routes(routes, arch).emit() for routes in (8, 300, 32768))


def sums(arch: str) -> Iterator[KernelSource]:
    for x in FLOATS:
        yield from (SumRoutes(x, arch, many, aligned).emit() for many in (False, True) for aligned in (True, False))


def sum_instructions(source: KernelSource) -> Iterator[str]:
    """Products and sums are rounded apart; whole vectors move 16 bytes at a time."""
    yield from ("FMUL", "FADD", "!FFMA")
    if not source.name.endswith("_u"):
        yield from (r"LDG\.E\.128", r"STG\.E\.128")


ROWS = {
    "route": Row(
        RouteTokens.emit,
        routers,
        route.CONSTRAINTS,
        {"x": [{"x": S8}], "scores": [{"scores": "relu"}], "slots": [{"slots": 1}, {"slots": 64}]},
        legal=RouteTokens(F16, "softmax", 4, False, ARCH),
        instructions=lambda source: ("REDUX",),
    ),
    "linear_route": Row(
        LinearRoute.emit,
        linear_routers,
        linear_route.CONSTRAINTS,
        {
            "x": [{"x": F32}],
            "weight": [{"weight": BF16}, {"weight": S8}],
            "logits": [{"logits": BF16}, {"weight": F32, "logits": F16}],
            "bias": [{"bias": BF16}, {"bias": S8}],
            "scores": [{"scores": "relu"}],
            "count": [{"count": 0}, {"count": 1025}],
            "columns": [{"columns": 0}, {"columns": 100}, {"columns": MAX_COLUMNS + 8}],
            "tokens": [{"tokens": 3}],
            "clusters": [{"arch": "sm_80"}, {"arch": "sm_89"}],
        },
        legal=LinearRoute(F16, F16, F16, "softmax", False, 128, 2048, 1, ARCH),
        instructions=linear_instructions,
    ),
    "sort_routes": Row(
        SortRoutes.emit,
        sorts,
        sort_routes.CONSTRAINTS,
        {"threads": [{"threads": 512}, {"threads": MOST_THREADS, "many": False}, {"threads": FEW_ROUTES // 2}]},
        legal=SortRoutes(ARCH, True),
        instructions=lambda source: ("!RED|ATOMG",),
    ),
    "sum_routes": Row(
        SumRoutes.emit,
        sums,
        sum_routes.CONSTRAINTS,
        {"x": [{"x": S8}]},
        legal=SumRoutes(F16, ARCH),
        instructions=sum_instructions,
    ),
}
