"""Tiles of ``w8a16_stream``, with times in ns."""

from __future__ import annotations

from collections.abc import Iterator

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.weight_cuts import Cut, cuts
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import EmitError
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream import w8a16
from qcut.emitters.stream.int8 import register_limit
from qcut.emitters.stream.w8a16 import W8A16_STREAM, W8A16Tile


def candidates(
    problem: GemmProblem, m: int, n: int, k: int, target: Target, copies: int = 1
) -> Iterator[tuple[W8A16Tile, float]]:
    """Tiles for m tokens and weights ``[n, k]``, or for m tokens with each of so many weights, in one launch.

    Raises:
        EmitError: m is more than `qcut.emitters.stream.w8a16.MAX_TOKENS`, or the family's constraints refuse the
            problem.
    """
    if not 1 <= m <= w8a16.MAX_TOKENS:
        raise EmitError(f"{W8A16_STREAM.name}: {m} tokens; allowed are 1 to {w8a16.MAX_TOKENS}")
    tokens = 1 if m == 1 and problem.experts else next(size for size in w8a16.TOKENS if m <= size)
    W8A16_STREAM.validate(problem, W8A16Tile(1, 1, tokens=tokens), target.arch)

    def tile_of(cut: Cut) -> W8A16Tile:
        return W8A16Tile(cut.row_tiles, cut.warps, cut.units, cut.prefetch, tokens, cut.splits)

    def fits(cut: Cut, ctas: int) -> bool:
        tile = tile_of(cut)
        smem = ctas * w8a16.smem_bytes(problem, tile)
        registers = w8a16.registers(problem, tile)
        return registers <= register_limit(ctas * cut.warps) and smem <= architecture(target.arch).smem_bytes

    return ((tile_of(cut), ns) for cut, ns, _ in cuts(n, k, target, fits, copies=copies))
