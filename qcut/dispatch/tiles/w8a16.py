"""Chooses tiles of ``w8a16_wgmma`` by a model of their time.

Source: measured on an H200 at six shapes and 17 to 1,024 tokens; the constants rank the measured tiles right
(docs/kernel-notes/few-tokens.md).
"""

from __future__ import annotations

from qcut.dispatch.gpus import Target
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.gemm.w8a16_wgmma import UNIT_COLUMNS, W8A16WgmmaTile, default_tiles

# Cycles of an H200's SM.
_START = 2500.0
"""Start, the first weights and tokens, and the end of a CTA."""
_UNIT = 300.0
"""Least time of a unit."""
_L2_BYTES = 22.0
"""Bytes of tokens and weights per cycle that reach an SM where all read."""
_CLUSTER = 1000.0
_SUM = 8.0


def wgmma_tile(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> W8A16WgmmaTile:
    """The tile of the menu with the least `wgmma_cycles`."""
    return min(default_tiles(), key=lambda tile: wgmma_cycles(tile, m, n, k, target))


def wgmma_cycles(tile: W8A16WgmmaTile, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch in cycles of an SM."""
    machine = target.machine
    units = -(-(-(-k // UNIT_COLUMNS)) // tile.splits)
    clusters = -(-n // (tile.rows * tile.share)) * -(-m // tile.tokens)
    at_once = max(1, machine.clusters_at_once(tile.splits * tile.share)) * tile.ctas
    waves = -(-clusters // at_once)
    ctas = clusters * tile.splits * tile.share
    resident = min(tile.ctas, -(-ctas // machine.sm_count))
    products = 4.0 * tile.tokens * tile.groups
    tokens = min(tile.tokens, -(-m // 8) * 8)
    traffic = (256 * tokens + 128 * tile.rows) / _L2_BYTES * min(1.0, ctas / machine.sm_count)
    unit = max(_UNIT, products * resident, traffic * resident)
    ends = _START + _SUM * tokens + _CLUSTER * (tile.splits * tile.share > 1)
    memory = n * k / machine.dram_bytes
    return max(waves * units * unit, memory) + waves * ends
