"""Tiles of ``codebook_wgmma``.

Source: constants fitted to layers of 64 to 1,024 tokens, timed on an H200 at 1280x1280, 5120x1280, 1280x5120,
4096x4096, 14336x4096 and 4096x14336.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.codebook_stream_wgmma import SLOT
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.wgmma import CODEBOOK_WGMMA, ROWS, CodebookWgmmaTile
from qcut.emitters.core.source import DType


class _WgmmaCost(NamedTuple):
    """Cycles of ``codebook_wgmma``."""

    unit: float  # of a unit
    token: float  # of a unit, for each token
    pairs_unit: float  # as ``unit``, with a table of pairs
    pairs_token: float  # as ``token``, with a table of pairs
    tile: float  # of a tile, beside its units
    output: float  # of a tile, for each token
    exchange: float  # for each token of a tile whose cluster shares K
    pair: float  # of a tile of a cluster that shares tokens
    launch: float  # of a launch


_WGMMA_F16 = _WgmmaCost(1194, 4.89, 1099, 4.87, 0, 18.3, 18, 100, 3900)
_WGMMA_S8 = _WgmmaCost(974, 1.05, 1160, 1.05, 494, 22.5, 18, 916, 2800)


def candidates(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target
) -> Iterator[tuple[CodebookWgmmaTile, float]]:
    """The menu, for m tokens and weights ``[n, k]``."""
    for tile in CODEBOOK_WGMMA.default_tiles(problem, target.arch):
        yield tile, cycles(problem, tile, m, n, k, target)


def cycles(problem: CodebookProblem, tile: CodebookWgmmaTile, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch for m tokens."""
    units_k, tokens, slots = -(-k // 128), tile.tokens, SLOT * (problem.slots - 1)
    units = -(-units_k // tile.splits)
    w = _WGMMA_S8 if problem.x is DType.S8 else _WGMMA_F16
    unit = (w.pairs_unit + w.pairs_token * tokens if tile.pairs else w.unit + w.token * tokens) + slots
    cycles = units * unit + w.tile + w.output * tokens + w.pair * (tile.cluster - 1)
    cycles += w.exchange * tokens * (tile.splits > 1)
    clusters = -(-n // (ROWS * tile.cluster)) * -(-m // tokens)
    return w.launch + -(-clusters // max(1, target.machine.clusters_at_once(tile.cluster * tile.splits))) * cycles
