"""Arguments of products with the weights of experts; rows are routes in tiles of one expert.

Device code: ``include/qcut/core/experts.cuh``.
"""

from __future__ import annotations

from qcut.emitters.core.source import Param

EXPERT_PARAMS = (
    Param("tile_experts", "ptr", "const int*"),
    Param("tile_routes", "ptr", "const int*"),
    Param("experts", "i32"),
    Param("per_row", "i32"),
    Param("rows", "i32"),
)
"""``tile_experts``: int32, the expert of each tile, those from 0 to ``experts - 1`` first; another number is none.
``tile_routes``: int32, the routes of each tile, -1 after the last; null if tiles are of one token, and route i is
tile i. ``per_row``: routes of each of ``rows`` rows of tokens. ``m``, the rows of a launch, counts those of all tiles.
"""
SUM_PARAMS = (
    Param("chosen", "ptr", "const int*"),
    Param("weights", "ptr", "const float*"),
    Param("experts", "i32"),
    Param("per_token", "i32"),
)
"""Of products that add the results of a token's routes, if each route has a row of tokens. ``chosen``: int32
``[m, per_token]``, the expert of each route; a number beyond 0 to ``experts - 1`` is no expert: its route counts
nothing. ``weights``: float32 of the same shape, by which results are multiplied.
"""
EXPERT_ROWS = "qcut::ExpertRows{tile_experts, tile_routes, experts, per_row, rows}"
"""The object of device code that these arguments make."""


def tile_rows(tokens: int) -> str:
    """The object of device code of CTAs that compute one tile of so many routes each."""
    return f"qcut::TileRows<{tokens}>{{{{tile_experts, tile_routes, experts, per_row, rows}}}}"
