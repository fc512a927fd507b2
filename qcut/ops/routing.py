"""The routes of tokens to experts: their choice, tiles of each expert's routes, and the sum of a token's results.

Route j of token m is one choice of an expert, with the number ``m * k + j``. Nothing is read on the host: shapes depend
on the arguments' shapes only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import routing
from qcut.numerics.routing import GROUP_SCORES, MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, SCORES
from qcut.ops.checks import F32, FLOAT_DTYPES, S32, check_dtype, check_tensor
from qcut.ops.registry import operator

_MAX_TILE = 1024
_MAX_POSITIONS = 2**30


@operator("route", returns="(Tensor, Tensor)")
class RouteOp(NamedTuple):
    """The experts that a router chooses for each token, and their weights.

    Scores s of each token are in float32: ``softmax`` of its logits, ``sigmoid`` of each logit, or the ``logits``. The
    k experts with the largest choice scores ``s + bias`` are chosen. Their weights are s, of ``logits`` the softmax of
    the k chosen logits, and with ``renormalize`` ``s / max(sum of the k in order + eps, min_sum)``; ``scaling``
    multiplies last.

    Softmax and sigmoid keep the order of logits: the choice without a bias, and without sums of two scores, compares
    logits. Of equal choice scores (-0 and 0 too) the expert with the lower index is chosen, and a NaN is below all
    other scores. A row of only NaN chooses the experts 0 to k - 1. Weights are NaN as float arithmetic makes them.

    Args:
        logits: float16, bfloat16 or float32 ``[M, E]``, E from 1 to 1024, of any strides.
        bias: float32 ``[E]``, added for the choice only; None: none is added.
        scores: ``"softmax"``, ``"sigmoid"`` or ``"logits"``.
        top_k: k, 1 to 32, at most E.
        groups: equal groups of neighbouring experts, 1 to 32, a divisor of E.
        top_groups: groups with the largest scores; only their experts may be chosen; they have k experts at least. Of
            equal groups the lower index is chosen.
        group_score: a group's score: ``"max"``, its largest choice score, or ``"top2"``, the sum of its two largest.
        renormalize: see above.
        eps: at least 0.
        min_sum: at least 0.
        scaling: a finite number.

    Returns:
        Weights float32 ``[M, k]`` and experts int32 ``[M, k]``, contiguous, by descending choice score.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: an option is not as above.

    Exactness: the choice is exact for given choice scores; where it compares logits, it is the same on every device.
    Scores have a relative error of at most ``(E + 128) * 2**-24``, or an absolute error of at most 2**-126; the
    arithmetic of weights rounds each operation to float32.
    """

    logits: Tensor
    bias: Tensor | None
    scores: str
    top_k: int
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    renormalize: bool = False
    eps: float = 0.0
    min_sum: float = 0.0
    scaling: float = 1.0

    def check(self) -> None:
        logits = self.logits
        check_dtype("route", "logits", logits.dtype, FLOAT_DTYPES)
        if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
            allowed = f"[M, E], E of 1 to {MAX_EXPERTS}"
            raise ShapeError(f"qcut::route: logits have shape {list(logits.shape)}; allowed: {allowed}")
        _check_choice("route", self, logits.shape[1], logits.device)

    def fake(self) -> tuple[Tensor, Tensor]:
        return _chosen(self.logits, self.top_k)

    def cpu(self) -> tuple[Tensor, Tensor]:
        return routing.route(*self)


@operator("linear_route", returns="(Tensor, Tensor)")
class LinearRouteOp(NamedTuple):
    """A router: `RouteOp` of the logits ``x @ weight.T + logits_bias``.

    Args:
        x: float16, bfloat16 or float32 ``[M, H]``, H at least 1, of any strides.
        weight: of the type of x, or float32, ``[E, H]``, E from 1 to 1024, of any strides.
        logits_dtype: float32, to which x and the weight are converted; or the type of x and the weight.
        bias: float32 ``[E]`` of scores, as in `RouteOp`; None: none is added.
        scores: see `RouteOp`, as for the arguments that follow it.
        logits_bias: ``[E]``, float32 or of the weight's type, added to logits in float32; None: none is added.

    Returns:
        Weights float32 ``[M, k]`` and experts int32 ``[M, k]``, contiguous, by descending choice score.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: an option is not as above.

    Exactness: logits are float32 sums, rounded to ``logits_dtype``, in an order that depends on the device; tokens that
    one kernel serves on a GPU have the same order whatever their number. For given logits, that of `RouteOp`. Where
    torch computes logits of 16 bits, for many tokens, a float32 ``logits_bias`` costs a product in float32.
    """

    x: Tensor
    weight: Tensor
    logits_dtype: torch.dtype
    bias: Tensor | None
    scores: str
    top_k: int
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    renormalize: bool = False
    eps: float = 0.0
    min_sum: float = 0.0
    scaling: float = 1.0
    logits_bias: Tensor | None = None
    early_read: bool = False

    @property
    def route(self) -> RouteOp:
        """The choice by logits that torch computes."""
        logits = routing.logits_of(self.x, self.weight, self.logits_dtype, self.logits_bias)
        return RouteOp(logits, *self[3:-2])

    def check(self) -> None:
        op, x, weight = "linear_route", self.x, self.weight
        check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
        if x.dim() != 2 or x.shape[1] < 1:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, H] with H >= 1")
        if weight.dim() != 2 or not 1 <= weight.shape[0] <= MAX_EXPERTS:
            allowed = f"[E, {x.shape[1]}], E of 1 to {MAX_EXPERTS}"
            raise ShapeError(f"qcut::{op}: weight has shape {list(weight.shape)}; allowed: {allowed}")
        experts = weight.shape[0]
        check_tensor(op, "weight", weight, _or_float32(x.dtype), (experts, x.shape[1]), x.device)
        check_dtype(op, "logits_dtype", self.logits_dtype, _or_float32(weight.dtype))
        if self.logits_bias is not None:
            check_tensor(op, "logits_bias", self.logits_bias, _or_float32(weight.dtype), (experts,), x.device)
        _check_choice(op, self, experts, x.device)

    def fake(self) -> tuple[Tensor, Tensor]:
        return _chosen(self.x, self.top_k)

    def cpu(self) -> tuple[Tensor, Tensor]:
        return self.route.cpu()


def compares_scores(call: RouteOp | LinearRouteOp) -> bool:
    """Whether the choice compares scores; otherwise it compares logits."""
    return call.bias is not None or (call.top_groups < call.groups and call.group_score == "top2")


def _or_float32(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return F32 if dtype is torch.float32 else (dtype, torch.float32)


def _chosen(tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of tokens, without values."""
    shape = (tokens.shape[0], top_k)
    return tokens.new_empty(shape, dtype=torch.float32), tokens.new_empty(shape, dtype=torch.int32)


@operator("sort_routes", returns="(Tensor, Tensor)")
class SortRoutesOp(NamedTuple):
    """Routes of the same expert in tiles, for products that load an expert's weights once for a tile.

    Experts are in ascending order, and the routes of an expert too. Of tiles of more than `MOST_GATHERED` routes, those
    that are at most half filled lie evenly among the others: multiprocessors that take tiles in turn then have equal
    work, and find weights in the L2 that the expert's other tiles have read. A route with an expert's number outside 0
    to ``count - 1`` is in no tile: another process computes it.

    Args:
        experts: int32 ``[M, k]``, k at least 1, of any strides.
        count: number of experts, 1 to 1024.
        tile: routes of a tile, 1 to 1024.

    Returns:
        The expert of each tile, int32 ``[T]``, and its routes, int32 ``[T, tile]``; contiguous. With ``R = M * k``
        routes, T is ``(R + min(count, R) * (tile - 1)) // tile``: all tiles that R routes can fill. A tile that is not
        filled ends in -1; unused tiles are last, with the expert -1.

    Raises:
        DtypeError, ShapeError: ``experts`` are not as above, or tiles have more than 2**30 positions.
        ConfigError: another count, or another tile.

    Exactness: bitwise.
    """

    experts: Tensor
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    tile: int

    def check(self) -> None:
        _check_experts("sort_routes", self.experts)
        _check_count("sort_routes", self.count)
        if not 1 <= self.tile <= _MAX_TILE:
            raise ConfigError(f"qcut::sort_routes: tile is {self.tile}; allowed: 1 to {_MAX_TILE}")
        if self.tiles * self.tile > _MAX_POSITIONS:
            found = f"experts {list(self.experts.shape)} in {self.tiles} tiles of {self.tile}"
            raise ShapeError(f"qcut::sort_routes: {found}; allowed: {_MAX_POSITIONS} positions")

    @property
    def tiles(self) -> int:
        """T, which may be symbolic."""
        return routing.tile_count(self.experts.shape[0] * self.experts.shape[1], self.count, self.tile)

    def fake(self) -> tuple[Tensor, Tensor]:
        return self.experts.new_empty(self.tiles), self.experts.new_empty((self.tiles, self.tile))

    def cpu(self) -> tuple[Tensor, Tensor]:
        return routing.sort_routes(*self)


@operator("sum_routes", returns="Tensor")
class SumRoutesOp(NamedTuple):
    """The weighted sum of each token's results, over its routes in order.

    ``y = rne(sum over j of weights[m, j] * float32(results[m * k + j]))``, from 0 on, every product and sum rounded to
    float32, and rne rounding to the nearest value of the results' type; with ``added``, ``rne(y + added)``. Routes with
    an expert's number outside 0 to ``count - 1`` are left out: their results may be anything.

    Args:
        results: float16, bfloat16 or float32 ``[M * k, H]``, H at least 1, of any strides.
        weights: float32 ``[M, k]``, of any strides.
        experts: int32 ``[M, k]``, k at least 1, of any strides.
        count: number of experts, 1 to 1024.
        added: ``[M, H]`` of the results' type, of any strides; None: none is added.

    Returns:
        y ``[M, H]``, contiguous, of the results' type.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: another count.

    Exactness: bitwise.
    """

    results: Tensor
    weights: Tensor
    experts: Tensor
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    added: Tensor | None = None

    def check(self) -> None:
        results, experts = self.results, self.experts
        _check_experts("sum_routes", experts)
        m, k = experts.shape
        check_dtype("sum_routes", "results", results.dtype, FLOAT_DTYPES)
        if results.dim() != 2 or results.shape[0] != m * k or results.shape[1] < 1:
            allowed = f"[{m * k}, H] with H >= 1"
            raise ShapeError(f"qcut::sum_routes: results have shape {list(results.shape)}; allowed: {allowed}")
        check_tensor("sum_routes", "experts", experts, S32, (m, k), results.device)
        check_tensor("sum_routes", "weights", self.weights, F32, (m, k), results.device)
        if self.added is not None:
            shape = (m, results.shape[1])
            check_tensor("sum_routes", "added", self.added, (results.dtype,), shape, results.device)
        _check_count("sum_routes", self.count)

    def fake(self) -> Tensor:
        return self.results.new_empty((self.experts.shape[0], self.results.shape[1]))

    def cpu(self) -> Tensor:
        return routing.sum_routes(*self)


def _check_experts(op: str, experts: Tensor) -> None:
    check_dtype(op, "experts", experts.dtype, S32)
    if experts.dim() != 2 or experts.shape[1] < 1:
        raise ShapeError(f"qcut::{op}: experts have shape {list(experts.shape)}; allowed: [M, k] with k >= 1")


def _check_count(op: str, count: int) -> None:
    if not 1 <= count <= MAX_EXPERTS:
        raise ConfigError(f"qcut::{op}: count is {count}; allowed: 1 to {MAX_EXPERTS}")


def _check_choice(op: str, call: RouteOp | LinearRouteOp, e: int, device: torch.device) -> None:
    """Check the bias and the options of a choice among e experts."""
    scores, top_k, groups, top_groups = call.scores, call.top_k, call.groups, call.top_groups
    group_score = call.group_score
    if call.bias is not None:
        check_tensor(op, "bias", call.bias, F32, (e,), device)
    if scores not in SCORES:
        raise ConfigError(f"qcut::{op}: scores are {scores!r}; allowed: {', '.join(SCORES)}")
    if not 1 <= top_k <= min(e, MAX_TOP_K):
        raise ConfigError(f"qcut::{op}: top_k is {top_k} of {e} experts; allowed: 1 to {min(e, MAX_TOP_K)}")
    if not 1 <= groups <= MAX_GROUPS or e % groups:
        allowed = f"1 to {MAX_GROUPS}, a divisor of {e} experts"
        raise ConfigError(f"qcut::{op}: groups are {groups}; allowed: {allowed}")
    size = e // groups
    if not -(-top_k // size) <= top_groups <= groups:
        allowed = f"{-(-top_k // size)}, which have {top_k} experts, to {groups}"
        raise ConfigError(f"qcut::{op}: top_groups are {top_groups}; allowed: {allowed}")
    if group_score not in GROUP_SCORES:
        raise ConfigError(f"qcut::{op}: group_score is {group_score!r}; allowed: {', '.join(GROUP_SCORES)}")
    if group_score == "top2" and top_groups < groups and size < 2:
        raise ConfigError(f"qcut::{op}: group_score is 'top2' for groups of 1 expert; allowed: of 2 and more")
    for name in ("eps", "min_sum"):
        if not 0 <= getattr(call, name) < math.inf:
            raise ConfigError(f"qcut::{op}: {name} is {getattr(call, name)}; allowed: 0 and more, finite")
    if not math.isfinite(call.scaling):
        raise ConfigError(f"qcut::{op}: scaling is {call.scaling}; allowed: a finite number")
