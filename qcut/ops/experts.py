"""Products of tokens with the weights of experts, a route at a time: which expert computes a row is read on the device.

`torch.ops.qcut.sort_routes` puts the routes of tokens to experts in tiles of one expert. A product takes each route's
token, wherever it lies, and writes the route's row; `torch.ops.qcut.sum_routes` adds the rows of a token.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics.codebook import layout, products
from qcut.numerics.routes import RouteTiles
from qcut.ops.checks import F32, S32, check_indices, check_tensor
from qcut.ops.codebook import CodebookGemmOp, RotateTokensOp
from qcut.ops.registry import SYMBOLIC, operator


def check_tiles(op: str, tiles: RouteTiles, rows: int, per_row: int, device: torch.device) -> None:
    """Check the routes of a product of ``rows`` tokens.

    Raises:
        DtypeError, ShapeError, DeviceError: tiles are not int32 ``[T]`` and ``[T, size]`` on the device.
        ConfigError: tiles of a size that no kernel has, or another number of routes.
        RangeError: on the CPU, a route that does not exist.
    """
    if per_row < 1 or tiles.count != rows * per_row:
        raise ConfigError(
            f"qcut::{op}: {tiles.count} routes of {rows} rows, {per_row} each; allowed: as many as all rows have"
        )
    count = tiles.count if tiles.routes is None else tiles.experts.shape[0]
    check_tensor(op, "tile_experts", tiles.experts, S32, (count,), device)
    if tiles.routes is None:
        return
    if tiles.size not in TILE_SIZES:
        allowed = ", ".join(map(str, TILE_SIZES))
        raise ConfigError(f"qcut::{op}: tiles of {tiles.size} routes; allowed: {allowed}")
    check_tensor(op, "tile_routes", tiles.routes, S32, (count, tiles.size), device)
    if device.type == "cpu":
        check_indices(op, "tile_routes", tiles.routes + 1, tiles.count + 1)


TILE_SIZES = (1, 8, 16, 32, 96, 128, 160, 192, 256)
"""Routes of a tile."""


@operator("rotate_routes", returns="(Tensor, Tensor)")
class RotateRoutesOp(NamedTuple):
    """`RotateTokensOp` of the token of each route, in the order of tiles, for products that take tokens so.

    Args:
        x: ``[M, K]``, as `RotateTokensOp` takes it.
        operands: see `RotateTokensOp`, as for the arguments up to ``out_dtype``.
        kind: ``hadamard`` or ``none``.
        tile_routes: int32 ``[T, size]``, routes from 0 to ``M * per_row - 1``, each in one tile at most, or -1; None:
            tokens stay in their order, and the result is `RotateTokensOp`'s.
        per_row: routes of each token: route r is one of token ``r // per_row``.

    Returns:
        Blocks of ``T * size`` rows, those of -1 holding anything, and scales of routes: float32 ``[M * per_row]`` with
        int8, of routes in no tile holding anything; else ``[0]``.

    On a GPU, the kernel after this one may read what the kernel before this one has written before it waits.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument is not as above.

    Exactness: bitwise.
    """

    x: Tensor
    operands: Tensor
    kind: str
    group_size: int
    seeds: list[int]
    out_dtype: torch.dtype
    tile_routes: Tensor | None
    per_row: int

    @property
    def rotation(self) -> RotateTokensOp:
        """The rotation of the tokens."""
        return RotateTokensOp(*self[:6])

    @property
    def routes(self) -> int:
        """Routes of all tokens, which may be symbolic."""
        return self.x.shape[0] * self.per_row

    def check(self) -> None:
        op = "rotate_routes"
        if self.kind == "qr":
            raise ConfigError(f"qcut::{op}: kind is 'qr'; allowed: hadamard, none")
        self.rotation.check()
        if self.per_row < 1:
            raise ConfigError(f"qcut::{op}: per_row is {self.per_row}; allowed: 1 and more")
        if self.tile_routes is None:
            return
        shape = self.tile_routes.shape
        if len(shape) != 2 or shape[0] * shape[1] % 8:
            raise ShapeError(f"qcut::{op}: tile_routes has shape {list(shape)}; allowed: [T, size], eights of routes")
        check_tensor(op, "tile_routes", self.tile_routes, S32, tuple(shape), self.x.device)
        if self.x.device.type == "cpu":
            check_indices(op, "tile_routes", self.tile_routes + 1, self.routes + 1)

    def fake(self) -> tuple[Tensor, Tensor]:
        if self.tile_routes is None:
            return self.rotation.fake()
        size = self.tile_routes.shape[0] * self.tile_routes.shape[1]
        blocks, _ = self.rotation._replace(x=self.x.new_empty((size, self.x.shape[1]))).fake()
        scales = self.routes if self.out_dtype is torch.int8 else 0
        return blocks, self.x.new_empty((scales,), dtype=torch.float32)

    def cpu(self) -> tuple[Tensor, Tensor]:
        if self.tile_routes is None:
            return self.rotation.cpu()
        routes = self.tile_routes.flatten().long()
        there = routes >= 0
        x = self.x.new_zeros((len(routes), self.x.shape[1]))
        x[there] = self.x[routes[there] // self.per_row]
        blocks, of_rows = self.rotation._replace(x=x).cpu()
        scale = self.fake()[1].zero_()
        if len(scale):
            scale[routes[there]] = of_rows[there]
        return blocks, scale


@operator("codebook_experts", returns="Tensor")
class CodebookExpertsOp(NamedTuple):
    """`CodebookGemmOp` of each route's token with the weight of the route's expert.

    Args:
        x: blocks of ``rows`` tokens, as `CodebookGemmOp` takes them. With tiles of more than `MOST_GATHERED` routes,
            blocks of the tokens of all places of tiles, as `RotateRoutesOp` makes them.
        row_scale: float32 ``[rows]`` of int8 tokens, ``[rows * per_row]`` of those of `RotateRoutesOp`; else None.
        rows: number of tokens.
        per_row: routes of each token: route r is one of token ``r // per_row``.
        tile_experts: int32 ``[T]``, see `qcut.numerics.routes.RouteTiles`.
        tile_routes: int32 ``[T, size]``, a size of `TILE_SIZES`, routes from 0 to ``rows * per_row - 1``, each in one
            tile at most, -1 after the last of a tile; None: every route is a tile, and ``T = rows * per_row``.
        units: of E experts, ``[E, ...]`` of `CodebookGemmOp`'s, as are ``norms``, ``fold``, ``col_scale`` and ``bias``.
        norms: see ``units``.
        fold: see ``units``; None with 16-bit tokens.
        col_scale: float32 ``[E, N]``.
        book: the codebook of all experts.
        bias: float32 ``[E, N]``; None: none is added.
        bits: of an index: 2, 3 or 4.
        activation: see `qcut.schemes.ACTIVATIONS`.
        out_dtype: float16, bfloat16 or float32.
        early_routes: the caller promises that the kernel queued just before does not write ``tile_experts`` and
            ``tile_routes``, and begins the next one, this, only when its own predecessor has ended; the weights are
            ready.

    Returns:
        y ``[rows * per_row, N]`` of ``out_dtype``, contiguous. Rows of routes in no tile hold anything.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError, QuantizationError: an argument is not as above.

    Exactness: that of `CodebookGemmOp`. Neither the size nor the order of tiles changes what int8 tokens give; of
    16-bit tokens the order of float32 sums depends on the kernel, which depends on sizes, never on routes.
    """

    x: Tensor
    row_scale: Tensor | None
    rows: Annotated[int, SYMBOLIC]
    per_row: int
    tile_experts: Tensor
    tile_routes: Tensor | None
    units: Tensor
    norms: Tensor
    fold: Tensor | None
    col_scale: Tensor
    book: list[int]
    bias: Tensor | None
    bits: int
    activation: str
    out_dtype: torch.dtype
    early_routes: bool = False

    @property
    def tiles(self) -> RouteTiles:
        """The routes."""
        return RouteTiles(self.tile_experts, self.tile_routes, self.rows * self.per_row)

    def expert(self, e: int) -> CodebookGemmOp:
        """The product of all tokens with one expert's weight."""
        fold, bias = (None if t is None else t[e] for t in (self.fold, self.bias))
        weight = self.units[e], self.norms[e], fold, self.col_scale[e], self.book, bias
        rows = self.tiles.places if self.tiles.ordered else self.rows
        return CodebookGemmOp(self.x, self.row_scale, rows, *weight, self.bits, self.activation, None, self.out_dtype)

    def check(self) -> None:
        op, experts = "codebook_experts", self.units.shape[0] if self.units.dim() else 0
        for name in ("units", "norms", "fold", "col_scale", "bias"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (not tensor.dim() or not experts or tensor.shape[0] != experts):
                raise ShapeError(f"qcut::{op}: {name} has shape {list(tensor.shape)}; allowed: [E, ...] with E >= 1")
        check_tiles(op, self.tiles, self.rows, self.per_row, self.x.device)
        one, scale = self.expert(0), self.row_scale
        if scale is not None and self.tiles.ordered:
            check_tensor(op, "row_scale", scale, F32, (self.tiles.count,), self.x.device)
            one = one._replace(row_scale=scale[:1].expand(one.m))
        one.check()

    def fake(self) -> Tensor:
        return self.x.new_empty((self.rows * self.per_row, self.col_scale.shape[1]), dtype=self.out_dtype)

    def cpu(self) -> Tensor:
        y, tiles = self.fake().zero_(), self.tiles
        source = torch.arange(tiles.count, device=self.x.device) // self.per_row
        x, scales = layout.from_blocks(self.x, self.expert(0).m), self.row_scale
        if tiles.ordered:
            assert tiles.routes is not None
            routes = tiles.routes.flatten()
            source[routes[routes >= 0].long()] = (routes >= 0).nonzero()[:, 0]
        elif scales is not None:
            scales = scales[source]
        book = products.unpack_book(self.book, torch.float16 if x.dtype is torch.int8 else x.dtype, x.device)
        for e, routes in tiles.by_expert(len(self.units)):
            mine = source[routes]
            one = self.expert(e)
            scale = None if scales is None else scales[routes]
            y[routes] = products.codebook_gemm_ref(
                x[mine], scale, one.units, one.norms, one.fold, one.col_scale, book, one.bias, self.bits,
                self.activation, None, self.out_dtype,
            )  # fmt: skip
        return y
