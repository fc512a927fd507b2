"""Families whose menus `qcut.dispatch.cost_model` orders."""

from __future__ import annotations

from collections.abc import Iterator

from qcut.dispatch import ahead_of_time
from qcut.dispatch.cost_model import GemmTile, estimate, tile_cycles
from qcut.dispatch.gpus import Target
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.families import CODEBOOK_CUTLASS, INT8_CUTLASS, W8A16_MMA, family
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

MODEL_ERROR = 1.5
"""Where CUTLASS could serve, a raw kernel is chosen only if the model expects CUTLASS to take this times as long."""
CUTLASS_TOKENS = 1024
"""Fewest tokens that ``codebook_cutlass`` serves."""


def int8(name: str, problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[GemmTile, float]]:
    """Of ``int8_cutlass``, ``int8_mma``, ``int8_wmma`` or ``int8_dp4a``, those that may be chosen."""
    weight = MODEL_ERROR if name == INT8_CUTLASS.name else 1.0
    for tile in family(name).menu(problem, target.arch):
        if ahead_of_time.is_open(problem, name, tile, target):
            yield tile, estimate(name, problem, tile, m, n, k, target).cycles / weight


def w8a16_mma(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Iterator[tuple[TileConfig, float]]:
    """16-bit products take twice the time of int8 products."""
    for tile in W8A16_MMA.default_tiles(problem, target.arch):
        yield tile, tile_cycles(tile, problem.epilogue.out.bits, m, n, 2 * k, target)


def codebook_cutlass(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target
) -> Iterator[tuple[TileConfig, float]]:
    """None for few tokens, for which the family is not the fastest."""
    for tile in CODEBOOK_CUTLASS.menu(problem, target.arch) if m >= CUTLASS_TOKENS else ():
        yield tile, tile_cycles(tile, problem.epilogue.out.bits, m, n, k, target)
