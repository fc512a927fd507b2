"""Chooses a family's tile for sizes: a module for each family lists tiles with the time that its model expects.

``candidates(problem, m, n, k, target)`` yields legal tiles with the estimated times of a launch, in cycles of an SM
unless a module says otherwise: times of one family order its tiles. Constants are an H200's; `Target.machine` converts
them. A module estimates as it lists, since a tile's time may depend on the SMs that its CTAs run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import fp8, int8_stream, tiled, w8a16_cutlass, w8a16_stream, w8a16_wgmma
from qcut.dispatch.heuristics.codebook import mma, stream, wgmma
from qcut.emitters import families
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.family import Family, Grid, Problem, Tile
from qcut.emitters.core.source import EmitError, KernelSource
from qcut.emitters.gemm.problem import GemmProblem

_CANDIDATES: dict[str, Callable[[Any, int, int, int, Target], Iterable[tuple[Any, float]]]] = {
    **{name: partial(tiled.int8, name) for name in families.FAMILIES},
    families.INT8_STREAM.name: int8_stream.candidates,
    families.W8A16_MMA.name: tiled.w8a16_mma,
    families.W8A16_STREAM.name: w8a16_stream.candidates,
    families.W8A16_WGMMA.name: w8a16_wgmma.candidates,
    families.W8A16_CUTLASS.name: w8a16_cutlass.candidates,
    families.FP8_CUTLASS.name: fp8.cutlass,
    families.FP8_MMA.name: fp8.mma,
    families.CODEBOOK_MMA.name: mma.candidates,
    families.CODEBOOK_STREAM.name: stream.candidates,
    families.CODEBOOK_STREAM_ROUNDS.name: stream.rounds_candidates,
    families.CODEBOOK_STREAM_WGMMA.name: wgmma.stream_candidates,
    families.CODEBOOK_WGMMA.name: wgmma.candidates,
    families.CODEBOOK_CUTLASS.name: tiled.codebook_cutlass,
}


@dataclass(frozen=True)
class Choice:
    """One kernel for one problem size.

    Attributes:
        family: name of a family of `qcut.emitters.families`.
        tile: the family's tile.
        swizzle: stripe width of the tile walk (CUTLASS).
        raster: order of the tile walk (CUTLASS): 0 as CUTLASS chooses, 1 along M first, 2 along N first.
        splits: parts that K is cut into (CUTLASS's stream-K kernels; tiles of raw kernels state their own).
        reason: ``tuned``, with the other GPU's name if its table is a start for this one, or ``model``; and the
            reason if CUTLASS's kernels were left out.
        tuned_us: time in µs, on this GPU, of the tuned row that the choice was taken from, or None.
        cost: time that the family's model expects, in the model's unit.
    """

    family: str
    tile: Any
    swizzle: int = 1
    raster: int = 0
    splits: int = 1
    reason: str = "model"
    tuned_us: float | None = None
    cost: float = field(default=math.inf, compare=False, repr=False)


def choose(names: Iterable[str], problem: Any, m: int, n: int, k: int, target: Target) -> Choice | None:
    """The candidate with the least time, the first of several; None: no candidate.

    Args:
        names: of families of the same kind of problem, with models that count in the same unit.
        problem: types, layouts and epilogue.
        m: rows of A.
        n: columns of B and D, or rows of a codebook weight.
        k: summed over; of a codebook weight all passes, padded.
        target: the GPU.

    Raises:
        EmitError: a family that makes tiles for sizes has none for these.
    """
    sizes = (problem, m, n, k, target)
    every = (Choice(name, tile, cost=cost) for name in names for tile, cost in _CANDIDATES[name](*sizes))
    return min(every, key=attrgetter("cost"), default=None)


def best(family: Family[Problem, Tile], problem: Problem, m: int, n: int, k: int, target: Target) -> Choice:
    """The choice of `choose` for one family.

    Raises:
        EmitError: there is none.
    """
    found = choose((family.name,), problem, m, n, k, target)
    if found is None:
        raise EmitError(f"{family.name}: no tile for {m}x{n}x{k} on {target.arch}")
    return found


def best_tile(family: Family[Problem, Tile], problem: Problem, m: int, n: int, k: int, target: Target) -> Tile:
    """The tile of `best`."""
    tile: Tile = best(family, problem, m, n, k, target).tile
    return tile


def emit(choice: Choice, problem: Any, arch: str) -> KernelSource:
    """Text of the chosen kernel."""
    if isinstance(problem, CodebookProblem) and choice.family != families.CODEBOOK_CUTLASS.name:
        problem = replace(problem, row_norm=False)  # the others read the norms
    if isinstance(problem, GemmProblem) and choice.family == families.INT8_STREAM.name:
        problem = int8_stream.of_experts(problem)
    return families.family(choice.family).emit(problem, choice.tile, arch)


def grid(choice: Choice, n: int, sm_count: int) -> Grid:
    """Returns the grid of a launch as a function of the rows of D; host launchers ignore this grid."""
    return families.family(choice.family).grid(choice.tile, n, sm_count)
