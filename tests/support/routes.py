"""Routes of tokens to experts in tiles, by loops: an oracle of sorting, and what products of experts take."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.routing import RouteTiles, tile_count


def random_experts(rows: int, per_row: int, count: int, seed: int = 0) -> Tensor:
    """int32 ``[rows, per_row]``: experts without the last one, if there are several, and some that do not exist."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(0, max(1, count - 1), (rows, per_row), generator=generator, dtype=torch.int32)
    experts[torch.rand(rows, per_row, generator=generator) < 0.1] = count
    experts[torch.rand(rows, per_row, generator=generator) < 0.05] = -1
    return experts


def tiles_of(experts: Tensor, count: int, size: int) -> RouteTiles:
    """Routes in tiles of ``size``, experts and routes in ascending order; of one route, each route is a tile."""
    flat = experts.flatten()
    if size == 1:
        return RouteTiles(flat.contiguous(), None, flat.numel())
    owners, rows = [], []
    for e in range(count):
        mine = (flat == e).nonzero()[:, 0].tolist()
        for first in range(0, len(mine), size):
            part = mine[first : first + size]
            owners.append(e)
            rows.append(part + [-1] * (size - len(part)))
    total = tile_count(flat.numel(), count, size)
    assert len(owners) <= total
    tile_experts = torch.full((total,), -1, dtype=torch.int32)
    tile_routes = torch.full((total, size), -1, dtype=torch.int32)
    if owners:
        tile_experts[: len(owners)] = torch.tensor(owners, dtype=torch.int32)
        tile_routes[: len(owners)] = torch.tensor(rows, dtype=torch.int32)
    return RouteTiles(tile_experts.to(flat.device), tile_routes.to(flat.device), flat.numel())


def in_tiles(experts: Tensor, count: int) -> Tensor:
    """bool ``[rows * per_row]``: routes with an expert that exists."""
    flat = experts.flatten()
    return (flat >= 0) & (flat < count)
