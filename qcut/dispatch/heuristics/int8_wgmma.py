"""Tiles of ``int8_wgmma``: a menu, for prompts.

Source: the tensor cores' own rate, the memory's of an H200, and ``codebook_wgmma``'s constants for the rest.
"""

from __future__ import annotations

from qcut.dispatch.gpus import Target
from qcut.emitters.codebook.wgmma import ROWS, CodebookWgmmaTile
from qcut.emitters.gemm.problem import GemmProblem

_TOKEN = 4.1
"""Cycles of a unit of 128 columns of int8, for each token; twice as many of 16 bits."""
_WEIGHTS = 845
"""Cycles in which the memory supplies a unit's weights while all SMs read."""
_TILE, _OUTPUT = 500, 20
"""Cycles of a tile without its units, and for each token."""
_PAIR = 100
"""Cycles of a tile of a cluster that shares tokens."""
_LAUNCH = 3000


def cycles(problem: GemmProblem, tile: CodebookWgmmaTile, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch for m tokens."""
    unit = max(_TOKEN * tile.tokens * problem.a.bits / 8, _WEIGHTS / target.machine.cycle_bandwidth)
    each = -(-k // 128) * unit + _TILE + _OUTPUT * tile.tokens + _PAIR * (tile.cluster - 1)
    clusters = -(-n // (ROWS * tile.cluster)) * -(-m // tile.tokens)
    return _LAUNCH + -(-clusters // max(1, target.machine.clusters_at_once(tile.cluster))) * each
