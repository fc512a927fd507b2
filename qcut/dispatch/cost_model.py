"""Estimates the time of a GEMM from its tile: occupancy, waves, products, loads. Estimates only order candidates.

Pure functions of sizes and the GPU. The GPU's figures are in `qcut.dispatch.machines`; numbers here are an H200's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import MULTIPROCESSORS
from qcut.emitters.core.arch import architecture
from qcut.emitters.families import CUTLASS_FAMILIES, family
from qcut.emitters.gemm.dp4a import Dp4aTile
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

GemmTile = TileConfig | Dp4aTile


DP4A_MACS = 256
"""Products per cycle of a multiprocessor with dp4a: 64 instructions of four products, from sm_80 on."""

_L2_BYTES = 32.0  # per multiprocessor and cycle
_TMA_BYTES = 40.0  # per multiprocessor and cycle, if the TMA loads (8192×1280×5120, tiles of 128×160)
_START_CYCLES = 1200
_EPILOGUE_BYTES = 16.0  # per multiprocessor and cycle
_LATENCY_CYCLES = 700  # of a load that misses the L2
_SATURATING_WARPS = 8  # two for each scheduler
_CLUSTER_CYCLES = 1500  # two barriers of a cluster, and the way there
_STEP_CYCLES = 8.0  # a warp's addresses, bounds and barrier in each step along K, over four schedulers
_STAGING_CYCLES = 1 / 256  # per byte that passes through registers into shared memory: load, permute, store
_CONTENTION = 0.15  # share of a hidden cost that shows nevertheless


@dataclass(frozen=True)
class Estimate:
    """The model's estimate for one kernel on one problem.

    Attributes:
        cycles: cycles of the multiprocessors, as if memory were no limit; candidates are ordered by this figure.
        time_us: the longer of ``cycles`` at the architecture's clock, and reading and writing everything once, in µs.
        ctas_per_sm: CTAs that fit one multiprocessor.
        waves: number of CTAs, divided by the CTAs that all multiprocessors hold at once.
    """

    cycles: float
    time_us: float
    ctas_per_sm: int
    waves: float


def occupancy(arch: str, threads: int, registers: int, smem_bytes: int) -> int:
    """CTAs that one multiprocessor holds, as threads, registers and shared memory allow.

    Args:
        arch: architecture.
        threads: threads per CTA.
        registers: registers per thread.
        smem_bytes: static and dynamic shared memory of a CTA.
    """
    sm, limits = MULTIPROCESSORS[arch], architecture(arch)
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256  # warps get registers in multiples of 256
    by_registers = limits.registers // max(1, per_warp * warps)
    by_memory = limits.sm_smem_bytes // (smem_bytes + 1024)
    return min(sm.ctas, sm.threads // (warps * 32), by_registers, by_memory)


def estimate(
    name: str,
    problem: GemmProblem,
    tile: GemmTile,
    m: int,
    n: int,
    k: int,
    target: Target,
) -> Estimate:
    """Estimate a kernel of any family.

    Args:
        name: one of `qcut.emitters.families.TUNED_FAMILIES`, or ``fp8_mma``.
        problem: types, layouts and epilogue.
        tile: the family's tile.
        m: rows of A and D.
        n: columns of B and D.
        k: summed over.
        target: the GPU.
    """
    bits = problem.epilogue.out.bits
    if name in CUTLASS_FAMILIES:
        assert isinstance(tile, TileConfig)
        # 16-bit products take twice the time of int8 products.
        cycles, ctas_per_sm = tile_cycles(tile, bits, m, n, k * problem.a.bits // 8, target), 1
        bm, bn, _ = tile.threadblock_shape
        ctas = -(-m // bm) * -(-n // bn)
    else:
        bm, bn, _ = tile.threadblock_shape
        ctas = -(-m // bm) * -(-n // bn) * (tile.splits if isinstance(tile, TileConfig) else 1)
        threads = family(name).threads(tile)
        registers = min(255, 48 + bm * bn // threads + (bm + bn) * 32 // threads)
        ctas_per_sm = max(1, occupancy(target.arch, threads, registers, family(name).smem_bytes(problem, tile)))
        cycles = _raw_cycles(name, problem, tile, m, n, k, target, threads, ctas, ctas_per_sm)
    moved = m * k * problem.a.bits / 8 + n * k * problem.b.bits / 8 + m * n * bits / 8
    machine = target.machine
    time_us = max(cycles, _START_CYCLES + moved / machine.dram_bytes) / machine.ghz / 1e3
    return Estimate(cycles, time_us, ctas_per_sm, ctas / (ctas_per_sm * target.sm_count))


def _raw_cycles(
    name: str,
    problem: GemmProblem,
    tile: GemmTile,
    m: int,
    n: int,
    k: int,
    target: Target,
    threads: int,
    ctas: int,
    ctas_per_sm: int,
) -> float:
    """Cycles while several CTAs share a multiprocessor; in the last wave fewer CTAs may share it."""
    bm, bn, bk = tile.threadblock_shape
    splits, stages = (tile.splits, max(2, tile.stages)) if isinstance(tile, TileConfig) else (1, 2)
    steps = math.ceil(math.ceil(k / bk) / splits)
    machine = target.machine
    if isinstance(tile, TileConfig):
        rate, feeding = machine.sm.tensor_macs * machine.sm.shares[name], 1.0 + 8.0 * _warp_perimeter(tile)
    else:
        rate, feeding = DP4A_MACS, 1.0 + _dp4a_perimeter(tile)
    products = bm * bn * bk * steps / rate * feeding + threads / 32 * steps * _STEP_CYCLES
    if isinstance(tile, Dp4aTile):
        products += (bm + bn) * bk * steps * _STAGING_CYCLES
    loads = (bm + bn) * bk * steps / _L2_BYTES
    if problem.layouts[:2] != "tn":
        loads *= 1.25  # transposed on the way, through registers
    latency = steps / (stages - 1) * (_LATENCY_CYCLES * machine.clock)
    store = bm * bn * problem.epilogue.out.bits / 8 / _EPILOGUE_BYTES / splits
    if splits > 1:
        store += _CLUSTER_CYCLES + bm * bn * 4 * (splits - 1) / splits / _EPILOGUE_BYTES

    def together(count: int) -> float:
        busy = min(1.0, count * threads / 32 / _SATURATING_WARPS)
        parts = (count * products / busy, count * loads, latency)
        return max(parts) + _CONTENTION * (sum(parts) - max(parts)) + count * store

    full, rest = divmod(ctas, ctas_per_sm * target.sm_count)
    return _START_CYCLES + full * together(ctas_per_sm) + (together(-(-rest // target.sm_count)) if rest else 0.0)


# Operands pass from shared memory to registers once per tile of a warp, or of a thread: small tiles read more bytes.


def _warp_perimeter(tile: TileConfig) -> float:
    wm, wn, _ = tile.warp_shape
    return 1 / wm + 1 / wn


def _dp4a_perimeter(tile: Dp4aTile) -> float:
    columns = tile.wniter * tile.tn
    return 1 / columns + columns / (tile.wm * tile.wn / 32)


def tile_cycles(tile: TileConfig, out_bits: int, m: int, n: int, k: int, target: Target) -> float:
    """Estimated cycles while one CTA has a multiprocessor: waves of tiles, each bound by its products or its loads.

    A tile of bm x bn costs the larger of ``bm·bn·K / MACs per cycle`` and its operand bytes over the
    SM's share of L2 bandwidth (a cluster loads what its CTAs share once), plus an epilogue that
    ping-pong hides behind the next tile.
    """
    bm, bn, _ = tile.threadblock_shape
    cm, cn = tile.cluster_shape
    tiles = math.ceil(m / (bm * cm)) * cm * math.ceil(n / (bn * cn)) * cn
    waves = math.ceil(tiles / target.sm_count)
    # Narrow tiles read shared memory faster than it delivers.
    width_penalty = 1.0 if bn >= 128 else 1.0 + 0.25 * (128 - bn) / 128
    products = bm * bn * k / target.machine.sm.tensor_macs * width_penalty
    loads = (bm / cn + bn / cm) * k / (_L2_BYTES if tile.schedule == "multistage" else _TMA_BYTES)
    epilogue = bm * bn * out_bits / 8 / _EPILOGUE_BYTES
    body = max(products, loads)
    hidden = tile.schedule == "pingpong"
    return _START_CYCLES + waves * body + (epilogue if hidden else waves * epilogue)
