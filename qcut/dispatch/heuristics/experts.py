"""Tiles of ``codebook_experts`` and ``int8_experts``.

Source: constants fitted to products of 1 to 64 tokens with the experts of Qwen3-30B-A3B in codebook4, and with those of
Mixtral-8x7B and GPT-OSS-20B where K is split, on an H200. The memory's part is the same for int8, by bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import CLUSTER_SIZES
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.families import CODEBOOK_EXPERTS, INT8_EXPERTS
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.experts import ExpertsFamily, ExpertsTile

# Shares by which the time exceeds that of reading the weights.
_IN_FLIGHT = 12.0  # divided by the kilobytes in flight on a multiprocessor
_ENOUGH, _MORE_THAN_ENOUGH = 48, 0.004  # kilobytes in flight, and for each beyond them
_FEW_WARPS = 3.0  # divided by its warps
_SUMS = 0.03  # for each of them, by the kilobytes of a unit
_MORE_UNITS = 0.05  # for each unit of a warp after the first
_EXCHANGE, _MORE_CTAS = 0.3, 0.1  # of the sums of a cluster, and for each of its CTAs, by the kilobytes of a unit
_ROW_TILES = (12, 8, 6, 4, 3, 2, 1)
"""Tiles of rows between two sums, the best first."""
_INT8_KB = 2
"""Kilobytes of a unit of int8 weights; a codebook's units count as one."""
_INT8_SMEM = 194 << 10
"""Shared memory of a multiprocessor with which its L1 still holds the lines of int8 weights in flight: with more,
products take 1.2 to 1.5 times as long."""


def candidates(
    problem: CodebookProblem | GemmProblem, size: int, k: int, target: Target
) -> Iterator[tuple[ExpertsTile, float]]:
    """Tiles for tiles of ``size`` routes and k columns; times are multiples of the time of reading the weights."""
    family: ExpertsFamily[Any] = INT8_EXPERTS
    unit_kb = _INT8_KB
    if isinstance(problem, CodebookProblem):
        family, unit_kb = CODEBOOK_EXPERTS, 1
    units_k = -(-k // 128)
    sizes = CLUSTER_SIZES if architecture(target.arch).clusters else (1,)
    for splits, units, prefetch, ctas in product(sizes, (1, 2, 4), (1, 2, 3, 4), (1, 2, 3)):
        warps = -(-units_k // (splits * units))
        if warps * ctas > 32 or splits > units_k:
            continue
        exchange = (_EXCHANGE + _MORE_CTAS * splits) / unit_kb if splits > 1 else 0
        for rows in _ROW_TILES:
            tile = ExpertsTile(size, max(prefetch, rows // prefetch * prefetch), warps, units, splits, prefetch, ctas)
            roomy = unit_kb == 1 or rows == 1 or ctas * family.smem_bytes(problem, tile) <= _INT8_SMEM
            if roomy and family.is_legal(problem, tile, target.arch):
                together, in_flight = warps * ctas, warps * ctas * units * prefetch * unit_kb
                share = _IN_FLIGHT / in_flight + _MORE_THAN_ENOUGH * max(0, in_flight - _ENOUGH)
                share += _FEW_WARPS / together + _SUMS / unit_kb * together
                yield tile, 1 + share + _MORE_UNITS * (units - 1) + exchange
                break
