"""The routes of tokens to experts, in plain torch: how they are chosen, sorted into tiles, and summed.

A route is a token's choice of one expert. Route j of token m has the number ``m * k + j``. No function reads a tensor
on the host, except `RouteTiles.by_expert`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SCORES = ("softmax", "sigmoid", "logits")
"""Scores of a router: of all logits, of each logit, or the logits (weights are the softmax of those chosen)."""
GROUP_SCORES = ("max", "top2")
"""A group's score: its largest choice score, or the sum of its two largest."""
MAX_EXPERTS = 1024
"""Most experts that a router chooses from, and that routes are sorted by."""
MAX_TOP_K = 32
"""Most experts of a token."""
MAX_GROUPS = 32
"""Most groups of experts."""
MOST_GATHERED = 32
"""Routes of a tile up to which products take each token from wherever it lies."""


class RouteTiles(NamedTuple):
    """The routes of tokens to experts, route ``m * k + j`` the jth of token m, in tiles of one expert.

    Attributes:
        experts: int32 ``[T]``, the expert of each tile; a tile with a number beyond the experts has none.
        routes: int32 ``[T, size]``, the routes of each tile, -1 after the last; None: route i is tile i.
        total: number of routes of all tokens, also of those that are in no tile.
    """

    experts: Tensor
    routes: Tensor | None
    total: int

    @property
    def size(self) -> int:
        """Routes of a tile."""
        return 1 if self.routes is None else self.routes.shape[1]

    @property
    def ordered(self) -> bool:
        """Whether products take tokens in the order of tiles, a row for each place of a tile."""
        return self.size > MOST_GATHERED

    @property
    def places(self) -> int:
        """Places of all tiles, also those without a route."""
        return self.experts.shape[0] * self.size

    def sources(self, per_row: int) -> Tensor:
        """int64 ``[total]``: the row in which products find the token of each route; 0 of routes that have none.

        Args:
            per_row: routes of each token.
        """
        if not self.ordered:
            return torch.arange(self.total, dtype=torch.int64, device=self.experts.device) // per_row
        assert self.routes is not None
        routes, found = self.routes.flatten(), self.experts.new_zeros(self.total, dtype=torch.int64)
        found[routes[routes >= 0].long()] = (routes >= 0).nonzero()[:, 0]
        return found

    def by_expert(self, experts: int) -> list[tuple[int, Tensor]]:
        """The experts that have routes, and the routes of each."""
        found = []
        for e in range(experts):
            if self.routes is None:
                mine = (self.experts == e).nonzero()[:, 0]
            else:
                mine = self.routes[self.experts == e].flatten()
                mine = mine[mine >= 0]
            if len(mine):
                found.append((e, mine.long()))
        return found


def route(
    logits: Tensor,
    bias: Tensor | None,
    scores: str,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    renormalize: bool = False,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`qcut.ops.routing.RouteOp`, arguments checked: weights float32 ``[M, k]`` and experts int32 ``[M, k]``."""
    x = logits.float().contiguous()
    is_limited = top_groups < groups
    # Softmax and sigmoid keep the order of logits. Their rounding would make ties, and differs between devices.
    by_score = bias is not None or (is_limited and group_score == "top2")
    choice = _scores(x, scores) if by_score else x
    if bias is not None:
        choice = choice + bias
    experts = _descending(choice)
    if is_limited:
        size = x.shape[1] // groups
        grouped = choice.unflatten(1, (groups, size))
        ranked = grouped.gather(2, _descending(grouped))
        best = ranked[..., 0] if group_score == "max" else ranked[..., 0] + ranked[..., 1]
        is_out = torch.ones_like(best, dtype=torch.int32)
        is_out.scatter_(1, _descending(best)[:, :top_groups], 0)
        experts = experts.gather(1, is_out.gather(1, experts // size).argsort(dim=1, stable=True))
    experts = experts[:, :top_k]
    weights = _scores(x, scores).gather(1, experts)
    if scores == "logits":
        weights = weights.softmax(1)
    if renormalize:
        total = weights[:, :1]
        for j in range(1, top_k):
            total = total + weights[:, j : j + 1]
        weights = weights / (total + eps).clamp(min=min_sum)
    return weights * scaling, experts.int()


def logits_of(x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Logits ``[M, E]`` of a dtype, of tokens ``[M, H]`` by a router's weight ``[E, H]``, both converted to the dtype.

    A bias ``[E]``, of that dtype or float32, is added in float32 before logits are rounded: in torch's product if it is
    of the dtype, else after a product of float32.
    """
    if bias is None or bias.dtype is dtype or dtype is torch.float32:
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return F.linear(x.float(), weight.float(), bias).to(dtype)


def _scores(logits: Tensor, kind: str) -> Tensor:
    if kind == "logits":
        return logits
    return logits.softmax(1) if kind == "softmax" else logits.sigmoid()


def _descending(values: Tensor) -> Tensor:
    """Indices of the last dimension from the largest value on; equal values in order of index, NaN last."""
    return (-values).argsort(dim=-1, stable=True)


def tile_count(routes: int, count: int, tile: int) -> int:
    """Tiles that hold this many routes, however they are distributed among ``count`` experts; may be symbolic."""
    return (routes + torch.sym_min(count, routes) * (tile - 1)) // tile


def short_tile(tile: int) -> int:
    """Most routes of tiles that lie evenly among the others: half of a tile's where tokens are ``ordered``, else 0."""
    return tile // 2 if tile > MOST_GATHERED else 0


def sort_routes(experts: Tensor, count: int, tile: int) -> tuple[Tensor, Tensor]:
    """`qcut.ops.routing.SortRoutesOp`, arguments checked: experts of tiles ``[T]`` and their routes ``[T, tile]``."""
    flat = experts.reshape(-1).long()
    routes = flat.numel()
    tiles = tile_count(routes, count, tile)
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((sizes[:count] + tile - 1) // tile).cumsum(0)
    # Routes of no expert get the same position past all tiles.
    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(routes, dtype=torch.int64, device=flat.device) - (sizes.cumsum(0) - sizes)[expert]
    starts = torch.cat([ends.new_zeros(1), ends])
    positions = torch.where(expert < count, starts[expert] * tile + rank, tiles * tile)
    tile_routes = torch.full((tiles * tile + 1,), -1, dtype=torch.int32, device=flat.device)
    tile_routes[positions] = order.int()
    tile_experts = torch.searchsorted(
        ends, torch.arange(tiles, dtype=ends.dtype, device=ends.device), right=True, out_int32=True
    )
    tile_experts.masked_fill_(tile_experts == count, -1)
    tile_routes = tile_routes[:-1].view(tiles, tile)
    filled = (tile_routes >= 0).sum(1)
    order = _evenly(filled > short_tile(tile), filled > 0)
    return tile_experts[order], tile_routes[order]


def _evenly(is_long: Tensor, is_filled: Tensor) -> Tensor:
    """The order of tiles in which short ones lie evenly among long ones, and those without routes are last."""
    is_short = is_filled & ~is_long
    i, j, k = (kind.cumsum(0) - 1 for kind in (is_long, is_short, ~is_filled))
    longs, shorts = i[-1:] + 1, j[-1:] + 1
    among_long = j + ((j + 1) * longs + shorts - 1) // shorts.clamp(min=1)
    among_short = i + i * shorts // longs.clamp(min=1)
    return torch.where(is_long, among_short, torch.where(is_short, among_long, longs + shorts + k)).argsort()


def sum_routes(results: Tensor, weights: Tensor, experts: Tensor, count: int, added: Tensor | None) -> Tensor:
    """`qcut.ops.routing.SumRoutesOp`, arguments checked: ``[M, H]``."""
    (m, k), h = experts.shape, results.shape[1]
    rows = results.reshape(m, k, h)
    is_computed = (experts >= 0) & (experts < count)
    total = torch.zeros(m, h, dtype=torch.float32, device=results.device)
    for j in range(k):
        product = weights[:, j, None] * rows[:, j].float()
        total = torch.where(is_computed[:, j, None], total + product, total)
    y = total.to(results.dtype)
    return y if added is None else y + added.contiguous()
