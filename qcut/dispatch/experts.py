"""Chooses tiles of routes, and the kernels of products with the weights of experts.

All choices are pure functions of sizes, types and the GPU; which experts are chosen is known on the device only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import itemgetter
from typing import Any

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import Choice, int8_stream, int8_wgmma, w8a16_stream
from qcut.dispatch.heuristics import experts as decode
from qcut.dispatch.heuristics.codebook import stream, wgmma
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.wgmma import TOKENS
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import (
    CODEBOOK_EXPERTS,
    CODEBOOK_STREAM,
    CODEBOOK_WGMMA,
    INT8_EXPERTS,
    INT8_STREAM,
    INT8_WGMMA,
    W8A16_STREAM,
)
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.w8a8 import W8A8Problem

ExpertProblem = CodebookProblem | GemmProblem | W8A8Problem

_SIZES = (8, 16)
"""Of tiles of few routes. Kernels take 32 too: `benchmarks/layers/experts.py --sizes` compares them."""
_ORDERED_SIZES = (128, 256)
_FEW_REPEATS = 1.1
"""Of an expert's routes, while each is a tile: the weights are read anew for each."""
_MANY = 32
"""Routes of an expert from which tokens are put in the order of tiles."""
_TILE, _ROUTE = 1200, 5
"""Times of a unit of weights in ``codebook_wgmma``: of a tile, and for each of its routes."""


def busy_experts(routes: int, experts: int) -> float:
    """Experts that so many routes are expected to reach, each expert as likely as any other."""
    return experts * (1 - (1 - 1 / experts) ** routes)


def tile_size(routes: int, experts: int, allowed: Collection[int] = (1, *_SIZES)) -> int | None:
    """Routes of a tile: 1 while few experts have several, else enough for most experts' routes; None: no size is left.

    Args:
        routes: of all tokens.
        experts: number of experts.
        allowed: sizes that kernels take.
    """
    busy = busy_experts(routes, experts)
    mean = routes / busy
    ordered = [size for size in _ORDERED_SIZES if size in allowed]
    gathered = [size for size in _SIZES if size in allowed]
    if mean <= _FEW_REPEATS or not gathered:
        gathered = [1] if 1 in allowed else gathered
    elif mean >= _MANY and ordered:
        return min(ordered, key=lambda size: max(1, mean / size + 0.5) * (_TILE + _ROUTE * size))
    return next((size for size in gathered if size >= mean + mean**0.5), gathered[-1] if gathered else None)


def busy_tiles(routes: int, experts: int, size: int) -> int:
    """Tiles that so many routes are expected to take."""
    busy = busy_experts(routes, experts)
    return routes if size == 1 else round(max(busy, routes / size + busy / 2 * (routes > size * busy)))


def select(problem: ExpertProblem, size: int, tiles: int, n: int, k: int, target: Target) -> Choice:
    """Choose the kernel of a product with routes in ``tiles`` tiles of ``size``.

    Raises:
        EmitError: no kernel takes the product on this GPU.
    """
    if isinstance(problem, W8A8Problem):
        return _least(INT8_STREAM, int8_stream.candidates(problem, size, n, k, target, copies=max(1, tiles)))
    is_codebook = isinstance(problem, CodebookProblem)
    if size in TOKENS:
        many, cycles = (CODEBOOK_WGMMA, wgmma.cycles) if is_codebook else (INT8_WGMMA, int8_wgmma.cycles)
        return _select_ordered(many, cycles, problem, size, tiles, n, k, target)
    family = CODEBOOK_EXPERTS if is_codebook else INT8_EXPERTS
    found = min(decode.candidates(problem, size, k, target), key=itemgetter(1), default=None)
    if found is not None:
        return Choice(family.name, found[0], cost=found[1])
    if isinstance(problem, GemmProblem):
        return _select_of_parts(problem, size, tiles, n, k, target)
    raise EmitError(f"{family.name}: no tile for tiles of {size} routes and {k} columns on {target.arch}")


def _select_of_parts(problem: GemmProblem, size: int, tiles: int, n: int, k: int, target: Target) -> Choice:
    """Of the kernels of dense layers, a CTA for each part of a tile: for any number of columns and unaligned tokens.

    Raises:
        EmitError: see `select`.
    """
    copies = max(1, tiles)
    if problem.a is DType.S8:
        found = int8_stream.candidates(int8_stream.of_experts(problem), size, n, k, target, copies=copies)
        return _least(INT8_STREAM, found)
    return _least(W8A16_STREAM, w8a16_stream.candidates(problem, size, n, k, target, copies=copies))


def _least(family: Family[Any, Any], candidates: Iterable[tuple[Any, float]]) -> Choice:
    tile, cost = min(candidates, key=itemgetter(1))
    return Choice(family.name, tile, cost=cost)


def select_summed(problem: CodebookProblem, m: int, routes: int, n: int, k: int, target: Target) -> Choice | None:
    """Choose the kernel that adds the results of m tokens' routes itself, so many of each; None: there is none."""
    sizes = (m * n, routes * 128 * -(-k // 128))  # the rows of all tokens follow one another
    try:
        return _least(CODEBOOK_STREAM, stream.candidates(problem, 1, *sizes, target, routes))
    except EmitError:
        return None


def _select_ordered(
    family: Family[Any, Any],
    cycles: Callable[..., float],
    problem: CodebookProblem | GemmProblem,
    size: int,
    tiles: int,
    n: int,
    k: int,
    target: Target,
) -> Choice:
    """The tile with the least time of those that take ``size`` routes in the order of tiles."""
    menu = [tile for tile in family.menu(problem, target.arch) if tile.tokens == size]
    if not menu:
        raise EmitError(f"{family.name}: no tile of {size} routes for {problem.name} on {target.arch}")
    return _least(family, ((tile, cycles(problem, tile, size * tiles, n, k, target)) for tile in menu))
