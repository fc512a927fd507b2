"""Tiles of ``codebook_stream_rounds``; times are in units of weights, as `codebook_stream`'s.

Source: measured on an H200; the model's constants rank the measured variants right on 14336x4096, 4096x14336,
4096x4096, 1280x1280 and 5120x1280 (docs/kernel-notes/few-tokens.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.codebook_stream import LATENCY, SUMS
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.constraints import holds
from qcut.emitters.core.source import EmitError
from qcut.emitters.stream.codebook_rounds import CONSTRAINTS, CodebookRoundsTile
from qcut.emitters.stream.family import ROW_TILE

_TOKENS = 0.1  # reading a token's part of a unit, 256 bytes, from the L2


def candidates(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target
) -> Iterator[tuple[CodebookRoundsTile, float]]:
    """Tiles for m tokens and weights ``[n, k]``.

    The model weighs the units that an SM reads, and the tokens that each of its CTAs reads for them, against too few
    warps to hide latency and the sums of many warps. A tile with the most CTAs that an SM holds is taken for each cut.

    Raises:
        EmitError: m is not 1 to 16.
    """
    if not 1 <= m <= 16:
        raise EmitError(f"codebook decode: m is {m}; allowed: 1 to 16")
    machine, units_k = target.machine, -(-k // 128)
    latency, pace = LATENCY * machine.bandwidth, machine.cycle_bandwidth
    tokens = next(t for t in (1, 8, 16) if t >= m)
    all_tiles = -(-n // ROW_TILE)

    def cost(tile: CodebookRoundsTile) -> float:
        rounds = -(-units_k // tile.warps)
        read = tile.warps * rounds * (tile.row_tiles + _TOKENS * m * problem.x.bits / 16)
        sums = pace * (tile.warps * m * tile.row_tiles / SUMS)

        def together(ctas: int) -> float:
            return ctas * (read * (1 + latency / (tile.warps * tile.row_tiles * ctas)) + sums)

        full, rest = divmod(-(-all_tiles // tile.row_tiles), tile.ctas * target.sm_count)
        return full * together(tile.ctas) + (together(-(-rest // target.sm_count)) if rest else 0.0)

    for row_tiles, warps, ctas in product((1, 2, 3, 4), (4, 8, 16), (1, 2, 3, 4)):
        tile = CodebookRoundsTile(tokens, row_tiles, warps, ctas)
        if holds(CONSTRAINTS, problem, tile, target.arch):
            yield tile, cost(tile)
