"""`qcut.ops.experts` on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.backends.cuda.codebook import Rotation
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, m_bucket, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.linear import float_token_scheme, linear_problem
from qcut.backends.cuda.operands import dense, parameters, row_major
from qcut.backends.cuda.routing import sum_routes
from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch import experts as dispatch
from qcut.dispatch import heuristics
from qcut.dispatch.experts import ExpertProblem
from qcut.dispatch.gemm import alignment_of
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.w8a8 import W8A8Problem
from qcut.errors import DtypeError
from qcut.numerics.codebook.products import is_pair_book
from qcut.numerics.routing import MOST_GATHERED
from qcut.ops.experts import (
    TILE_SIZES,
    CodebookExpertsOp,
    Int16x8ExpertsOp,
    RotateRoutesOp,
    W8A8ExpertsOp,
    W8A16ExpertsOp,
)
from qcut.ops.registry import serves

# ── routes ───────────────────────────────────────────────────────────────────────────────────────


def tile_size(
    tokens: int, top_k: int, experts: int, largest: int, device: int, without: Collection[int] = ()
) -> int | None:
    """Routes of the tiles for so many tokens, the same for all numbers of tokens that kernels are chosen for at once.

    Args:
        tokens: number of tokens.
        top_k: routes of each.
        experts: number of experts.
        largest: that the layers take.
        device: CUDA ordinal.
        without: sizes that have turned out to have no kernel.

    Returns:
        A size, or None: none is left.
    """
    limit = largest if architecture(target(device).arch).wgmma else MOST_GATHERED
    allowed = [size for size in TILE_SIZES if size <= min(limit, largest) and size not in without]
    return dispatch.tile_size(m_bucket(tokens) * top_k, experts, allowed)


_rotation_plans = PlanCache(Rotation.load)


@serves(RotateRoutesOp)
def rotate_routes(call: RotateRoutesOp) -> tuple[Tensor, Tensor]:
    call.check()
    blocks, scale = call.fake()
    x, (m, k), passes, device = call.x, call.x.shape, len(call.seeds), call.x.get_device()
    places = m if call.tile_routes is None else call.tile_routes.numel()
    if m == 0 or places == 0:
        return blocks, scale
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    stride = x.stride(0) if m > 1 else k
    aligned = x.data_ptr() % 16 == 0 and (m == 1 or stride * x.element_size() % 16 == 0)
    described = Rotation(
        call.kind,
        x.dtype,
        call.out_dtype,
        m_bucket(places),
        k,
        call.group_size,
        passes,
        aligned,
        routed=True,
        natural=call.natural,
    )
    (plan,) = _rotation_plans[described, device]
    operands, routes = dense(call.operands), None if call.tile_routes is None else dense(call.tile_routes)
    scales = (scale.data_ptr(),) if call.out_dtype is torch.int8 else ()
    matrices = (operands.data_ptr(),) if call.kind != "none" else ()
    k_padded = blocks.shape[0] * blocks.shape[3] // passes
    args = (x.data_ptr(), blocks.data_ptr(), *scales, *matrices, stride, places, k, k_padded)
    order = (0 if routes is None else routes.data_ptr(), call.per_row, call.routes)
    plan.launch(places, (*args, *order), current_stream(device))
    return blocks, scale


# ── what all kinds of weights have in common ─────────────────────────────────────────────────────


class ExpertProduct(NamedTuple):
    """All that chooses the kernel of a product with the weights of experts.

    Attributes:
        describe: makes the description that emitters take, of n, k and ``options``.
        options: types, widths, bias, activation: what ``describe`` takes.
        size: routes of a tile.
        tiles: tiles that are expected to have routes.
        n: number of output channels of an expert.
        k: columns of an expert's weight, padded.
    """

    describe: Callable[..., ExpertProblem]
    options: tuple[Any, ...]
    size: int
    tiles: int
    n: int
    k: int

    def load(self, device: int) -> LaunchPlan:
        """The launch plan.

        Raises:
            EmitError: no kernel takes the product on this GPU.
        """
        gpu = target(device)
        problem = self.describe(self.n, self.k, *self.options)
        choice = dispatch.select(problem, self.size, self.tiles, self.n, self.k, gpu)
        source = heuristics.emit(choice, problem, gpu.arch)
        grid = heuristics.grid(choice, self.n, gpu.sm_count)
        return LaunchSpec(source, grid, pdl=pdl(device)).load(device)


_plans = PlanCache(ExpertProduct.load)


def _launch(
    call: CodebookExpertsOp | W8A8ExpertsOp | W8A16ExpertsOp | Int16x8ExpertsOp,
    describe: Callable[..., ExpertProblem],
    options: tuple[Any, ...],
    sizes: tuple[int, int, int],
    args: tuple[int, ...],
) -> None:
    """Queue the kernel of a call, with ``args`` and the arguments of tiles; ``sizes`` are experts, n and k."""
    tiles, (experts, n, k), device = call.tiles, sizes, call.tile_experts.get_device()
    if not tiles.total or not tiles.places:
        return
    rows = tiles.total // call.per_row
    busy = dispatch.busy_tiles(m_bucket(rows) * call.per_row, experts, tiles.size)
    plan = _plans[ExpertProduct(describe, options, tiles.size, busy, n, k), device]
    routed = parameters(tiles.experts, tiles.routes)
    routes = routed.addresses if tiles.routes is not None else (*routed.addresses, 0)
    tokens = (1, tiles.total) if tiles.ordered else (call.per_row, rows)
    plan.launch(tiles.places, (*args, *routes, experts, *tokens), current_stream(device))


# ── the operators ────────────────────────────────────────────────────────────────────────────────


def _codebook_problem(
    n: int,
    k: int,
    x: torch.dtype,
    bits: int,
    slots: int,
    out: torch.dtype,
    bias: bool,
    activation: str,
    offsets: bool,
    pairs: bool,
    early_routes: bool,
    *,
    summed: bool = False,
) -> CodebookProblem:
    return codebook_dispatch.problem_of(
        x=DTYPES[x],
        bits=bits,
        slots=slots,
        out=DTYPES[out],
        bias=bias,
        activation=activation,
        residual=False,
        alignment_n=alignment_of(n),
        offsets=offsets,
        pairs=pairs,
        experts=True,
        early_routes=early_routes,
        summed=summed,
    )


class SummedProduct(NamedTuple):
    """All that chooses the kernel of a product that adds the results of each token's routes.

    Attributes:
        options: see `ExpertProduct`.
        tokens: number of tokens.
        routes: of each token.
        n: number of output channels of an expert.
        k: columns of an expert's weight, padded.
    """

    options: tuple[Any, ...]
    tokens: int
    routes: int
    n: int
    k: int

    def load(self, device: int) -> LaunchPlan:
        """The launch plan."""
        gpu, choice = target(device), _choice_of_sum(self, device)
        assert choice is not None
        source = heuristics.emit(choice, self.problem, gpu.arch)
        return LaunchSpec(source, heuristics.grid(choice, self.n, gpu.sm_count), pdl=pdl(device)).load(device)

    @property
    def problem(self) -> CodebookProblem:
        """What emitters take."""
        return _codebook_problem(self.n, self.k, *self.options, summed=True)


@cache
def _choice_of_sum(product: SummedProduct, device: int) -> heuristics.Choice | None:
    gpu = target(device)
    return dispatch.select_summed(product.problem, product.tokens, product.routes, product.n, product.k, gpu)


_sum_plans = PlanCache(SummedProduct.load)


@serves(CodebookExpertsOp)
def codebook_experts(call: CodebookExpertsOp) -> Tensor:
    call.check()
    y, (experts, n), units, rows = call.fake(), call.col_scale.shape, call.units.shape[2], call.tiles.places
    x, weight = dense(call.x), parameters(call.units, call.norms, call.fold)
    vectors, routed = parameters(call.row_scale, call.col_scale, call.bias), parameters(call.tile_experts, call.weights)
    slots, offsets = call.norms.shape[3], call.norms.shape[5] == 4
    copied = weight.copied or vectors.copied or routed.copied or parameters(call.tile_routes).copied
    early = call.early_routes and not copied and not call.tiles.ordered
    types = (call.x.dtype, call.bits, slots, call.out_dtype, call.bias is not None, call.activation)
    options = (*types, offsets, is_pair_book(call.book), early)
    given = (x.data_ptr(), *weight.addresses, y.data_ptr())
    if call.weights is not None:
        (tokens, routes), device = call.weights.shape, x.get_device()
        product = SummedProduct(options, m_bucket(tokens), routes, n, 128 * units)
        if call.per_row > 1 or not tokens or _choice_of_sum(product, device) is None:
            return sum_routes(call.summed(codebook_experts(call._replace(weights=None))))
        args = (*given, tokens, n, units, n, *call.book, *vectors.addresses, *routed.addresses, experts, routes)
        _sum_plans[product, device].launch(tokens, args, current_stream(device))
        return y
    args = (*given, rows, n, units, n, *call.book, *vectors.addresses)
    _launch(call, _codebook_problem, options, (experts, n, 128 * units), args)
    return y


def _w8a8_problem(n: int, k: int, out: torch.dtype, bias: bool, activation: str) -> GemmProblem:
    return replace(linear_problem(DTYPES[out], n, k, bias, activation, "w8a8"), experts=True)


@serves(W8A8ExpertsOp)
def w8a8_experts(call: W8A8ExpertsOp) -> Tensor:
    call.check()
    y, (experts, n, k), rows = call.fake(), call.qweight.shape, call.tiles.places
    q, weight = dense(call.q), parameters(call.qweight)
    vectors = parameters(call.q_scale, call.weight_scale, call.bias)
    _launch(
        call,
        _w8a8_problem,
        (call.out_dtype, call.bias is not None, call.activation),
        (experts, n, k),
        (q.data_ptr(), *weight.addresses, y.data_ptr(), rows, n, k, k, k, n, *vectors.addresses),
    )
    return y


def _int16x8_problem(n: int, k: int, x: torch.dtype, bias: bool, activation: str, aligned: bool) -> W8A8Problem:
    epilogue = linear_problem(DTYPES[x], n, k, bias, activation, "int16x8").epilogue
    return W8A8Problem("rows", DTYPES[x], epilogue, aligned, experts=True)


@serves(Int16x8ExpertsOp)
def int16x8_experts(call: Int16x8ExpertsOp) -> Tensor:
    call.check()
    y, (experts, n, k_padded), rows = call.fake(), call.qweight.shape, call.tiles.places
    (x, stride), k, weight = row_major(call.x), call.x.shape[1], parameters(call.qweight)
    vectors = parameters(call.weight_scale, call.bias)
    aligned = (x.data_ptr() | stride * x.element_size()) % 16 == 0
    sizes = (rows, n, k, stride, k_padded, n, call.x_absmax.data_ptr(), rows)
    _launch(
        call,
        _int16x8_problem,
        (x.dtype, call.bias is not None, call.activation, aligned),
        (experts, n, k),
        (x.data_ptr(), *weight.addresses, y.data_ptr(), *sizes, *vectors.addresses),
    )
    return y


def _w8a16_problem(
    n: int, k: int, x: torch.dtype, bias: bool, activation: str, aligned: bool, scheme: str
) -> GemmProblem:
    return replace(linear_problem(DTYPES[x], n, k, bias, activation, scheme, aligned=aligned), experts=True)


@serves(W8A16ExpertsOp)
def w8a16_experts(call: W8A16ExpertsOp) -> Tensor:
    call.check()
    if call.x.dtype is torch.float32:
        raise DtypeError(f"qcut::w8a16_experts: x is {call.x.dtype}; allowed on CUDA: float16, bfloat16")
    y, (experts, n, k_padded), k, rows = call.fake(), call.qweight.shape, call.k, call.tiles.places
    ordered, weight, vectors = call.tiles.ordered, parameters(call.qweight), parameters(call.weight_scale, call.bias)
    (x, stride) = (dense(call.x), k) if ordered else row_major(call.x)
    aligned = ordered or (x.data_ptr() | stride * x.element_size()) % 16 == 0
    _launch(
        call,
        _w8a16_problem,
        (x.dtype, call.bias is not None, call.activation, aligned, float_token_scheme(call.qweight, call.weight_scale)),
        (experts, n, k),
        (x.data_ptr(), *weight.addresses, y.data_ptr(), rows, n, k, stride, k_padded, n, *vectors.addresses),
    )
    return y
