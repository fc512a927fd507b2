"""Tiles of routes: the ways of tokens to their experts, in the order in which products of experts read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
