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
from qcut.numerics.int16 import TOKENS_PER_BLOCK
from qcut.numerics.routing import RouteTiles
from qcut.ops.checks import F32, S8, S32, check_absmax, check_indices, check_tensor
from qcut.ops.codebook import CodebookGemmOp, RotateTokensOp
from qcut.ops.linear import Int8LinearOp, Int16x8LinearOp, W8A16LinearOp
from qcut.ops.registry import SYMBOLIC, operator
from qcut.ops.routing import SumRoutesOp

TILE_SIZES = (1, 8, 16, 32, 96, 128, 160, 192, 256)
"""Routes of a tile."""


def check_stacked(op: str, **weights: Tensor | None) -> None:
    """Raises `ShapeError` unless all tensors have as many parts, one of each expert, at least one."""
    counts = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in weights.items() if tensor is not None}
    experts = next(iter(counts.values()))
    for name, count in counts.items():
        if not count or count != experts:
            found = list(weights[name].shape)  # type: ignore[union-attr]
            raise ShapeError(f"qcut::{op}: {name} has shape {found}; allowed: [{experts or 'E'}, ...] with E >= 1")


def check_routes(op: str, tiles: RouteTiles) -> None:
    """Raises `RangeError` unless all routes of tiles, on the CPU, exist."""
    if tiles.routes is not None:
        check_indices(f"qcut::{op}", "tile_routes", tiles.routes[tiles.routes >= 0], tiles.total)


def check_tiles(
    op: str,
    tiles: RouteTiles,
    rows: int,
    per_row: int,
    device: torch.device,
) -> None:
    """Check the routes of a product of ``rows`` tokens.

    Raises:
        DtypeError, ShapeError, DeviceError: tiles are not int32 ``[T]`` and ``[T, size]`` on the device.
        ConfigError: tiles of a size that no kernel has, or another number of routes.
    """
    if per_row < 1 or tiles.total != rows * per_row:
        raise ConfigError(
            f"qcut::{op}: {tiles.total} routes of {rows} rows, {per_row} each; allowed: as many as all rows have"
        )
    count = tiles.total if tiles.routes is None else tiles.experts.shape[0]
    check_tensor(op, "tile_experts", tiles.experts, S32, (count,), device)
    if tiles.routes is None:
        return
    if tiles.size not in TILE_SIZES:
        allowed = ", ".join(map(str, TILE_SIZES))
        raise ConfigError(f"qcut::{op}: tiles of {tiles.size} routes; allowed: {allowed}")
    check_tensor(op, "tile_routes", tiles.routes, S32, (count, tiles.size), device)


def check_tokens(
    op: str, name: str, x: Tensor, tiles: RouteTiles, rows: int, k: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check the tokens of a product with int8 weights: ``[rows, k]``, or blocks of all places of ordered tiles.

    Raises:
        DtypeError, ShapeError, DeviceError: they are not of that shape, in one of the types, on the device of tiles.
    """
    shape: tuple[int, ...] = (rows, k)
    if tiles.ordered:
        per_block = 128 // x.element_size()
        shape = (-(-k // 128) * 128 // per_block, (tiles.places + 7) // 8, 8, per_block)
    check_tensor(op, name, x, dtypes, shape, tiles.experts.device)


def tokens_of(x: Tensor, tiles: RouteTiles, k: int) -> Tensor:
    """Rows of the tokens that `check_tokens` takes: of ordered tiles one for each place."""
    return layout.from_blocks(x, tiles.places, natural=True)[:, :k] if tiles.ordered else x


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
        natural: int8 columns of blocks lie in natural order, as products with int8 weights take them; False: in that of
            `RotateTokensOp`.

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
    natural: bool = False

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

    def fake(self) -> tuple[Tensor, Tensor]:
        if self.tile_routes is None:
            return self.rotation.fake()
        size = self.tile_routes.shape[0] * self.tile_routes.shape[1]
        blocks, _ = self.rotation._replace(x=self.x.new_empty((size, self.x.shape[1]))).fake()
        scales = self.routes if self.out_dtype is torch.int8 else 0
        return blocks, self.x.new_empty((scales,), dtype=torch.float32)

    def cpu(self) -> tuple[Tensor, Tensor]:
        if self.natural:
            blocks, scale = self._replace(natural=False).cpu()
            rows = layout.from_blocks(blocks, 8 * blocks.shape[1])
            return layout.to_blocks(rows, natural=True), scale
        if self.tile_routes is None:
            return self.rotation.cpu()
        routes = self.tile_routes.flatten().long()
        check_indices("qcut::rotate_routes", "tile_routes", routes[routes >= 0], self.routes)
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
        tile_experts: int32 ``[T]``, see `qcut.numerics.routing.RouteTiles`.
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
        weights: float32 ``[M, k]`` of all routes in order, each a tile; None: y has rows of routes.

    Returns:
        y ``[rows * per_row, N]`` of ``out_dtype``, contiguous. Rows of routes in no tile hold anything. With
        ``weights``, what `SumRoutesOp` makes of these rows: ``[M, N]``.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError, QuantizationError: an argument is not as above.
        RangeError: on the CPU, a route that does not exist.

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
    weights: Tensor | None = None

    @property
    def tiles(self) -> RouteTiles:
        """The routes."""
        return RouteTiles(self.tile_experts, self.tile_routes, self.rows * self.per_row)

    def summed(self, results: Tensor) -> SumRoutesOp:
        """The sum of the results of all routes."""
        weights = self.weights
        assert weights is not None
        return SumRoutesOp(results, weights, self.tile_experts.view(weights.shape), len(self.units), None)

    def expert(self, e: int) -> CodebookGemmOp:
        """The product of all tokens with one expert's weight."""
        fold, bias = (None if t is None else t[e] for t in (self.fold, self.bias))
        weight = self.units[e], self.norms[e], fold, self.col_scale[e], self.book, bias
        rows = self.tiles.places if self.tiles.ordered else self.rows
        return CodebookGemmOp(self.x, self.row_scale, rows, *weight, self.bits, self.activation, None, self.out_dtype)

    def check(self) -> None:
        op = "codebook_experts"
        check_stacked(op, units=self.units, norms=self.norms, fold=self.fold, col_scale=self.col_scale, bias=self.bias)
        check_tiles(op, self.tiles, self.rows, self.per_row, self.x.device)
        one, scale = self.expert(0), self.row_scale
        if scale is not None and self.tiles.ordered:
            check_tensor(op, "row_scale", scale, F32, (self.tiles.total,), self.x.device)
            one = one._replace(row_scale=scale[:1].expand(one.m))
        one.check()
        if self.weights is not None:
            shape = self.weights.shape
            if self.tile_routes is not None or len(shape) != 2 or shape[0] * shape[1] != self.tiles.total:
                tiles = "of one route" if self.tile_routes is None else f"of {self.tiles.size} routes"
                raise ShapeError(
                    f"qcut::{op}: weights has shape {list(shape)}, with tiles {tiles}; allowed: [M, k], M * k = "
                    f"{self.tiles.total}, with tiles of one route"
                )
            check_tensor(op, "weights", self.weights, F32, tuple(shape), self.x.device)

    def fake(self) -> Tensor:
        rows = self.rows * self.per_row if self.weights is None else self.weights.shape[0]
        return self.x.new_empty((rows, self.col_scale.shape[1]), dtype=self.out_dtype)

    def cpu(self) -> Tensor:
        check_routes("codebook_experts", self.tiles)
        if self.weights is not None:
            return self.summed(self._replace(weights=None).cpu()).cpu()
        y, tiles = self.fake().zero_(), self.tiles
        source = tiles.sources(self.per_row)
        x, scales = layout.from_blocks(self.x, self.expert(0).m), self.row_scale
        if scales is not None and not tiles.ordered:
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


@operator("w8a8_experts", returns="Tensor")
class W8A8ExpertsOp(NamedTuple):
    """`Int8LinearOp` of each route's token with the weight of the route's expert.

    Args:
        q: int8 ``[rows, K]``, K a multiple of 16 up to `qcut.schemes.K_MAX`, as
            `torch.ops.qcut.quantize_per_token` gives them. With tiles of more than `MOST_GATHERED` routes, blocks of
            the tokens of all places of tiles, as `RotateRoutesOp` makes them without a rotation, ``natural``.
        q_scale: float32 ``[rows]``, or ``[rows * per_row]`` of those of `RotateRoutesOp`.
        rows: number of tokens.
        per_row: routes of each token, see `CodebookExpertsOp`, as are ``tile_experts`` and ``tile_routes``.
        tile_experts: int32 ``[T]``.
        tile_routes: int32 ``[T, size]``, a size of `TILE_SIZES`, or None.
        qweight: int8 ``[E, N, K]``, N >= 1.
        weight_scale: float32 ``[E, N]``.
        bias: float32 ``[E, N]``; None: none is added.
        activation: one of `qcut.schemes.ACTIVATIONS`.
        out_dtype: float16, bfloat16 or float32.

    Returns:
        y ``[rows * per_row, N]`` of ``out_dtype``, contiguous. Rows of routes in no tile hold anything.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument is not as above.
        RangeError: on the CPU, a route that does not exist.

    Exactness: bitwise ``int8_linear``, whatever the tiles.
    """

    q: Tensor
    q_scale: Tensor
    rows: Annotated[int, SYMBOLIC]
    per_row: int
    tile_experts: Tensor
    tile_routes: Tensor | None
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str
    out_dtype: torch.dtype

    @property
    def tiles(self) -> RouteTiles:
        """The routes."""
        return RouteTiles(self.tile_experts, self.tile_routes, self.rows * self.per_row)

    def expert(self, e: int, q: Tensor, scale: Tensor) -> Int8LinearOp:
        """The product of tokens with one expert's weight."""
        bias = None if self.bias is None else self.bias[e]
        return Int8LinearOp(q, scale, self.qweight[e], self.weight_scale[e], bias, self.activation, self.out_dtype)

    def check(self) -> None:
        op, q = "w8a8_experts", self.q
        check_stacked(op, qweight=self.qweight, weight_scale=self.weight_scale, bias=self.bias)
        check_tiles(op, self.tiles, self.rows, self.per_row, q.device)
        scales = self.tiles.total if self.tiles.ordered else self.rows
        check_tensor(op, "q_scale", self.q_scale, F32, (scales,), q.device)
        none = q.new_empty((0, self.qweight.shape[-1]), dtype=torch.int8)
        self.expert(0, none, self.q_scale[:0]).check()
        check_tokens(op, "q", q, self.tiles, self.rows, self.qweight.shape[2], S8)

    def fake(self) -> Tensor:
        return self.q.new_empty((self.rows * self.per_row, self.weight_scale.shape[1]), dtype=self.out_dtype)

    def cpu(self) -> Tensor:
        check_routes("w8a8_experts", self.tiles)
        y, tiles = self.fake().zero_(), self.tiles
        q, source = tokens_of(self.q, tiles, self.qweight.shape[2]), tiles.sources(self.per_row)
        scale = self.q_scale if tiles.ordered else self.q_scale[source]
        for e, routes in tiles.by_expert(len(self.qweight)):
            y[routes] = self.expert(e, q[source[routes]], scale[routes]).cpu()
        return y


@operator("w8a16_experts", returns="Tensor")
class W8A16ExpertsOp(NamedTuple):
    """`W8A16LinearOp` of each route's token with the weight of the route's expert.

    Args:
        x: float16 or bfloat16 ``[rows, K]``, K >= 1, any strides; the CPU takes float32 as well. With tiles of more
            than `MOST_GATHERED` routes, blocks as `RotateRoutesOp` makes them without a rotation.
        rows: number of tokens.
        k: K.
        per_row: routes of each token, see `CodebookExpertsOp`, as are ``tile_experts`` and ``tile_routes``.
        tile_experts: int32 ``[T]``.
        tile_routes: int32 ``[T, size]``, a size of `TILE_SIZES`, or None.
        qweight: int8, or finite float8_e4m3fn, ``[E, N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[E, N]``, or ``[E, ceil(N / 16), ceil(K / 128)]``, see `W8A16LinearOp`.
        bias: float32 ``[E, N]``; None: none is added.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        y ``[rows * per_row, N]`` of x's type, contiguous. Rows of routes in no tile hold anything.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument is not as above.
        RangeError: on the CPU, a route that does not exist.

    Exactness: that of ``w8a16_linear``; the order of sums depends on sizes, never on routes.
    """

    x: Tensor
    rows: Annotated[int, SYMBOLIC]
    k: int
    per_row: int
    tile_experts: Tensor
    tile_routes: Tensor | None
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str

    @property
    def tiles(self) -> RouteTiles:
        """The routes."""
        return RouteTiles(self.tile_experts, self.tile_routes, self.rows * self.per_row)

    def expert(self, e: int, x: Tensor) -> W8A16LinearOp:
        """The product of tokens with one expert's weight."""
        bias = None if self.bias is None else self.bias[e]
        return W8A16LinearOp(x, self.qweight[e], self.weight_scale[e], bias, self.activation)

    def check(self) -> None:
        op, x = "w8a16_experts", self.x
        check_stacked(op, qweight=self.qweight, weight_scale=self.weight_scale, bias=self.bias)
        check_tiles(op, self.tiles, self.rows, self.per_row, x.device)
        self.expert(0, x.new_empty((0, self.k))).check()
        check_tokens(op, "x", x, self.tiles, self.rows, self.k, (x.dtype,))

    def fake(self) -> Tensor:
        return self.x.new_empty((self.rows * self.per_row, self.qweight.shape[1]))

    def cpu(self) -> Tensor:
        check_routes("w8a16_experts", self.tiles)
        y, tiles = self.fake().zero_(), self.tiles
        x, source = tokens_of(self.x, tiles, self.k), tiles.sources(self.per_row)
        for e, routes in tiles.by_expert(len(self.qweight)):
            y[routes] = self.expert(e, x[source[routes]]).cpu()
        return y


@operator("int16x8_experts", returns="Tensor")
class Int16x8ExpertsOp(NamedTuple):
    """`Int16x8LinearOp` of each route's token with the weight of the route's expert.

    Args:
        x: float16, bfloat16 or float32 ``[rows, K]``, K from 1 to `qcut.schemes.K_MAX`, any strides.
        x_absmax: float32 ``[rows]``, contiguous, ``max |x[m]|``.
        per_row: routes of each token, see `CodebookExpertsOp`, as are ``tile_experts`` and ``tile_routes``.
        tile_experts: int32 ``[T]``.
        tile_routes: int32 ``[T, size]``, a size of 1 or 8, or None.
        qweight: int8 ``[E, N, padded_k(K)]``, N >= 1, zero padded.
        weight_scale: float32 ``[E, N]``.
        bias: float32 ``[E, N]``; None: none is added.
        activation: one of `qcut.schemes.ACTIVATIONS`.

    Returns:
        y ``[rows * per_row, N]`` of x's type, contiguous. Rows of routes in no tile hold anything.

    Raises:
        DtypeError, ShapeError, DeviceError, ConfigError: an argument is not as above.
        QuantizationError: K beyond the exact range.
        RangeError: on the CPU, a route that does not exist.

    Exactness: bitwise ``int16x8_linear``, whatever the tiles.
    """

    x: Tensor
    x_absmax: Tensor
    per_row: int
    tile_experts: Tensor
    tile_routes: Tensor | None
    qweight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    activation: str

    @property
    def tiles(self) -> RouteTiles:
        """The routes."""
        return RouteTiles(self.tile_experts, self.tile_routes, len(self.x) * self.per_row)

    def expert(self, e: int, x: Tensor) -> Int16x8LinearOp:
        """The product of tokens with one expert's weight."""
        bias = None if self.bias is None else self.bias[e]
        return Int16x8LinearOp(x, self.qweight[e], self.weight_scale[e], bias, self.activation)

    def check(self) -> None:
        op, x, tiles = "int16x8_experts", self.x, self.tiles
        if x.dim() != 2:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K]")
        check_stacked(op, qweight=self.qweight, weight_scale=self.weight_scale, bias=self.bias)
        check_tiles(op, tiles, len(x), self.per_row, x.device)
        if tiles.size > TOKENS_PER_BLOCK:
            raise ConfigError(f"qcut::{op}: tiles of {tiles.size} routes; allowed: 1, {TOKENS_PER_BLOCK}")
        self.expert(0, x).check()
        check_absmax(op, "x_absmax", self.x_absmax, x)

    def fake(self) -> Tensor:
        return self.x.new_empty((len(self.x) * self.per_row, self.qweight.shape[1]))

    def cpu(self) -> Tensor:
        check_routes("int16x8_experts", self.tiles)
        y, source = self.fake().zero_(), self.tiles.sources(self.per_row)
        for e, routes in self.tiles.by_expert(len(self.qweight)):
            y[routes] = self.expert(e, self.x[source[routes]]).cpu()
        return y
