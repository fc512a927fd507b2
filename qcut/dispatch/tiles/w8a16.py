"""Chooses tiles of ``w8a16_wgmma`` by a model of their time.

Source: measured on an H200 at six shapes and 32 to 1,024 tokens (docs/kernel-notes/few-tokens.md).
"""

from __future__ import annotations

from qcut.dispatch.gpus import Target
from qcut.emitters.gemm.w8a16_wgmma import UNIT_COLUMNS, W8A16WgmmaTile, ctas, default_tiles

# Cycles of an H200's SM.
_START = 3000.0
"""Start, the first weights and tokens, and the end of a CTA."""
_UNIT = 300.0
"""Least time of a unit."""
_CONVERT = 350.0
"""A warp's conversion of a unit, where each quarter of the SM has one such warp."""
_L2_BYTES = 24.0
"""Bytes of tokens and weights per cycle that reach an SM where all read."""
_CLUSTER = 1000.0
_SUM = 8.0


def wgmma_tile(m: int, n: int, k: int, target: Target) -> W8A16WgmmaTile:
    """The tile of the menu with the least `wgmma_cycles`."""
    return min(default_tiles(), key=lambda tile: wgmma_cycles(tile, m, n, k, target))


def is_wgmma_better(m: int, n: int, k: int, target: Target) -> bool:
    """Whether ``w8a16_wgmma`` is faster than ``w8a16_stream``, which takes few tokens, or than ``w8a16_mma``."""
    return m > 32


def wgmma_cycles(tile: W8A16WgmmaTile, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch in cycles of an SM."""
    machine = target.machine
    all_units = -(-k // UNIT_COLUMNS)
    units = -(-all_units // tile.splits)
    count, size = ctas(tile, m, n), tile.share * tile.splits
    at_once = max(1, machine.clusters_at_once(size)) * size * tile.ctas
    waves = -(-count // at_once)
    resident = min(tile.ctas, -(-count // machine.sm_count))
    tokens = min(tile.tokens, -(-m // 8) * 8)
    products = 4.0 * tile.tokens * tile.groups * resident
    convert = _CONVERT * tile.groups * resident
    busy = min(1.0, count / machine.sm_count)
    traffic = (256 * tokens / tile.share + 128 * tile.rows) * resident / _L2_BYTES * busy
    unit = max(_UNIT, products, convert, traffic)
    ends = _START + _SUM * tokens + _CLUSTER * (size > 1)
    memory = n * k / machine.dram_bytes
    return max(waves * units * unit, memory) + waves * ends
