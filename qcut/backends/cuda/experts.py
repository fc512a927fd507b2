"""`qcut.ops.experts` on CUDA."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, m_bucket, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import dense, parameters
from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch import experts as dispatch
from qcut.dispatch import heuristics
from qcut.dispatch.gemm import alignment_of
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.products import is_pair_book
from qcut.numerics.routes import MOST_GATHERED
from qcut.ops.experts import CodebookExpertsOp, RotateRoutesOp
from qcut.ops.registry import serves


def tile_size(tokens: int, top_k: int, experts: int, largest: int, device: int) -> int:
    """Routes of the tiles for so many tokens, the same for all numbers of tokens that kernels are chosen for at once.

    Args:
        tokens: number of tokens.
        top_k: routes of each.
        experts: number of experts.
        largest: that the layers take.
        device: CUDA ordinal.
    """
    limit = largest if architecture(target(device).arch).wgmma else MOST_GATHERED
    return dispatch.tile_size(m_bucket(tokens) * top_k, experts, min(limit, largest))


class RouteRotation(NamedTuple):
    """All that chooses the kernel of a rotation of routes; see `qcut.backends.cuda.codebook.Rotation`."""

    kind: str
    x: torch.dtype
    out: torch.dtype
    rows: int
    k: int
    group_size: int
    passes: int
    aligned: bool

    def load(self, device: int) -> LaunchPlan:
        """The launch plan."""
        given = self.kind, DTYPES[self.x], DTYPES[self.out], self.rows, self.k, self.group_size, self.passes
        (kernel,) = codebook_dispatch.select_rotation(*given, target(device), aligned=self.aligned, routed=True)
        k_padded = Geometry(self.k, self.group_size).k_padded
        grid = codebook_dispatch.rotation_grid(kernel, k_padded)
        return LaunchSpec(kernel.emit(), grid, pdl=pdl(device)).load(device)


_rotation_plans = PlanCache(RouteRotation.load)


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
    options = (call.group_size, passes, aligned)
    plan = _rotation_plans[RouteRotation(call.kind, x.dtype, call.out_dtype, m_bucket(places), k, *options), device]
    operands, routes = dense(call.operands), None if call.tile_routes is None else dense(call.tile_routes)
    scales = (scale.data_ptr(),) if call.out_dtype is torch.int8 else ()
    matrices = (operands.data_ptr(),) if call.kind != "none" else ()
    k_padded = blocks.shape[0] * blocks.shape[3] // passes
    args = (x.data_ptr(), blocks.data_ptr(), *scales, *matrices, stride, places, k, k_padded)
    order = (0 if routes is None else routes.data_ptr(), call.per_row)
    plan.launch(places, (*args, *order), current_stream(device))
    return blocks, scale


class ExpertProduct(NamedTuple):
    """All that chooses the kernel of a product with codebook weights of experts.

    Attributes:
        x: dtype of the tokens.
        size: routes of a tile.
        tiles: tiles that are expected to have routes.
        n: number of output channels of an expert.
        units: units of 128 columns along K, all passes together.
        bits: bits of an index.
        slots: norms per 128 columns.
        out: dtype of the result.
        bias: whether a bias is added.
        activation: activation after the bias.
        offsets: whether norms have offsets.
        pairs: whether the codebook is of pairs.
        early_routes: whether the routes, and the weights, are ready.
    """

    x: torch.dtype
    size: int
    tiles: int
    n: int
    units: int
    bits: int
    slots: int
    out: torch.dtype
    bias: bool
    activation: str
    offsets: bool
    pairs: bool
    early_routes: bool

    @property
    def problem(self) -> CodebookProblem:
        """The product as emitters see it."""
        return codebook_dispatch.problem_of(
            x=DTYPES[self.x],
            bits=self.bits,
            slots=self.slots,
            out=DTYPES[self.out],
            bias=self.bias,
            activation=self.activation,
            residual=False,
            alignment_n=alignment_of(self.n),
            offsets=self.offsets,
            pairs=self.pairs,
            experts=True,
            early_routes=self.early_routes,
        )

    def load(self, device: int) -> LaunchPlan:
        """The launch plan.

        Raises:
            EmitError: no kernel takes the product on this GPU.
        """
        gpu = target(device)
        choice = dispatch.select_codebook(self.problem, self.size, self.tiles, self.n, 128 * self.units, gpu)
        source = heuristics.emit(choice, self.problem, gpu.arch)
        grid = heuristics.grid(choice, self.n, gpu.sm_count)
        return LaunchSpec(source, grid, pdl=pdl(device)).load(device)


_plans = PlanCache(ExpertProduct.load)


@serves(CodebookExpertsOp)
def codebook_experts(call: CodebookExpertsOp) -> Tensor:
    call.check()
    y, device = call.fake(), call.x.get_device()
    if not len(y) or not len(call.tile_experts):
        return y
    tiles = call.tiles
    experts, n = call.col_scale.shape
    product = ExpertProduct(
        x=call.x.dtype,
        size=tiles.size,
        tiles=dispatch.busy_tiles(m_bucket(call.rows) * call.per_row, experts, tiles.size),
        n=n,
        units=call.units.shape[2],
        bits=call.bits,
        slots=call.norms.shape[3],
        out=call.out_dtype,
        bias=call.bias is not None,
        activation=call.activation,
        offsets=call.norms.shape[5] == 4,
        pairs=is_pair_book(call.book),
        early_routes=call.early_routes and not tiles.ordered,
    )
    plan = _plans[product, device]
    x, weight = dense(call.x), parameters(call.units, call.norms, call.fold)
    vectors = parameters(call.row_scale, call.col_scale, call.bias)
    routed = parameters(tiles.experts, tiles.routes)
    rows, tokens = tiles.places, (1, tiles.count) if tiles.ordered else (call.per_row, call.rows)
    routes = routed.addresses if tiles.routes is not None else (*routed.addresses, 0)
    plan.launch(
        rows,
        (x.data_ptr(), *weight.addresses, y.data_ptr(), rows, n, product.units, n, *call.book, *vectors.addresses,
         *routes, experts, *tokens),
        current_stream(device),
    )  # fmt: skip
    return y
