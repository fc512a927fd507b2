"""Tiles of ``int8_stream``, with times in ns."""

from __future__ import annotations

from collections.abc import Iterator

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.weight_cuts import Cut, cuts
from qcut.emitters.core.arch import architecture
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream import w8a8
from qcut.emitters.stream.int8 import register_limit
from qcut.emitters.stream.w8a8 import INT8_STREAM, W8A8Problem, W8A8Tile

_TOKEN_BYTES_PER_NS = 50.0
"""Bytes of int8 tokens per ns that each SM reads while all SMs read the same."""
_SUM_BYTES_PER_NS = 200.0
"""Bytes of warps' sums per ns that an SM adds in shared memory."""


def of_experts(problem: GemmProblem) -> W8A8Problem:
    """The description that ``int8_stream`` takes of a product with the weights of experts."""
    return W8A8Problem("none", problem.epilogue.out, problem.epilogue, experts=True)


def candidates(
    problem: W8A8Problem, m: int, n: int, k: int, target: Target, copies: int = 1
) -> Iterator[tuple[W8A8Tile, float]]:
    """Tiles for m tokens and weights ``[n, k]``, or for m tokens with each of so many weights, in one launch.

    Raises:
        EmitError: m is more than the kernel holds (`qcut.emitters.stream.w8a8.tokens_of`), K beyond the exact range, or
            the family's constraints refuse the problem.
    """
    tokens, halves = w8a8.tokens_of(problem, m, k), problem.epilogue.halves
    INT8_STREAM.validate(problem, W8A8Tile(1, 1, tokens=tokens), target.arch)
    # Several tiles of tokens make a cluster's sums dear: it lost at every shape that was measured.
    clusters = tokens <= w8a8.MAX_ROWS and not halves
    for common_sums in (False,) if tokens <= w8a8.MAX_ROWS else (False, True):

        def tile_of(cut: Cut, common_sums: bool = common_sums) -> W8A8Tile:
            return W8A8Tile(cut.row_tiles, cut.warps, cut.units, cut.prefetch, tokens, cut.splits, common_sums)

        def fits(cut: Cut, ctas: int) -> bool:
            tile = tile_of(cut)
            smem = ctas * w8a8.smem_bytes(problem, tile)
            registers = w8a8.registers(problem, tile, target.arch)
            return registers <= register_limit(ctas * cut.warps) and smem <= architecture(target.arch).smem_bytes

        for cut, ns, turns in cuts(n, k, target, fits, clusters=clusters, copies=copies):
            yield tile_of(cut), ns + turns * _tokens_ns(tokens, k, cut, common_sums, target)


def _tokens_ns(tokens: int, k: int, cut: Cut, common_sums: bool, target: Target) -> float:
    """Time in ns that more than eight int8 tokens add to the weights': to read them, and to sum over warps."""
    if tokens <= w8a8.MAX_ROWS:
        return 0.0
    read = tokens * k / cut.splits / _TOKEN_BYTES_PER_NS
    sums = 0.0 if common_sums else cut.warps * tokens * 16 * cut.row_tiles * 4 / _SUM_BYTES_PER_NS
    return (read + sums) / target.machine.clock
