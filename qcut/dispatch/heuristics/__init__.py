"""Chooses a family's tile for sizes: a module for each family lists tiles with the time that its model expects.

``candidates(problem, m, n, k, target)`` yields legal tiles with the estimated times of a launch, in cycles of an SM
unless a module says otherwise: times of one family order its tiles. Constants are an H200's; `Target.machine` converts
them. A tile's time may depend on where its CTAs run, which the tile does not say: a module estimates as it lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import (
    codebook_mma,
    codebook_stream,
    codebook_stream_rounds,
    codebook_stream_wgmma,
    codebook_wgmma,
    int8_stream,
    tiled,
    w8a16_cutlass,
    w8a16_stream,
    w8a16_wgmma,
)
from qcut.emitters import families
from qcut.emitters.core.family import Family, Problem, Tile
from qcut.emitters.core.source import EmitError

_CANDIDATES: dict[str, Callable[[Any, int, int, int, Target], Iterable[tuple[Any, float]]]] = {
    **{name: partial(tiled.int8, name) for name in families.FAMILIES},
    families.INT8_STREAM.name: int8_stream.candidates,
    families.W8A16_MMA.name: tiled.w8a16_mma,
    families.W8A16_STREAM.name: w8a16_stream.candidates,
    families.W8A16_WGMMA.name: w8a16_wgmma.candidates,
    families.W8A16_CUTLASS.name: w8a16_cutlass.candidates,
    families.CODEBOOK_MMA.name: codebook_mma.candidates,
    families.CODEBOOK_STREAM.name: codebook_stream.candidates,
    families.CODEBOOK_STREAM_ROUNDS.name: codebook_stream_rounds.candidates,
    families.CODEBOOK_STREAM_WGMMA.name: codebook_stream_wgmma.candidates,
    families.CODEBOOK_WGMMA.name: codebook_wgmma.candidates,
    families.CODEBOOK_CUTLASS.name: tiled.codebook_cutlass,
}


def choose(names: Iterable[str], problem: Any, m: int, n: int, k: int, target: Target) -> tuple[str, Any, float] | None:
    """The family, its tile and the time of the candidate with the least time, the first of several; None: no candidate.

    Args:
        names: of families of the same kind of problem whose models count in the same unit.
        problem: types, layouts and epilogue.
        m: rows of A.
        n: columns of B and D, or rows of a codebook weight.
        k: summed over; of a codebook weight all passes, padded.
        target: the GPU.

    Raises:
        EmitError: a family that makes tiles for sizes has none for these.
    """
    least: list[tuple[str, Any, float]] = []
    for name in names:
        one = min(_CANDIDATES[name](problem, m, n, k, target), key=itemgetter(1), default=None)
        if one is not None:
            least.append((name, *one))
    return min(least, key=itemgetter(2), default=None)


def best_tile(family: Family[Problem, Tile], problem: Problem, m: int, n: int, k: int, target: Target) -> Tile:
    """The tile of `choose` for one family.

    Raises:
        EmitError: there is none.
    """
    found = choose((family.name,), problem, m, n, k, target)
    if found is None:
        raise EmitError(f"{family.name}: no tile for {m}x{n}x{k} on {target.arch}")
    tile: Tile = found[1]
    return tile
