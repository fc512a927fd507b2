"""Tiles of ``codebook_stream`` and ``codebook_stream_rounds``; times are in units of weights that an H200's SM reads.

Source: measured on an H200; the model's constants rank the measured variants right on 14336x4096, 4096x14336,
4096x4096, 1280x1280 and 5120x1280 (docs/kernel-notes/few-tokens.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import CLUSTER_SIZES
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import holds
from qcut.emitters.core.source import EmitError
from qcut.emitters.stream import codebook as stream
from qcut.emitters.stream import codebook_rounds
from qcut.emitters.stream.codebook import MAX_ROW_TILES, CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.family import ROW_TILE

# Where the memory is slower, fewer units are read in the time of a sum or an exchange.
_LATENCY, _MIRRORED_LATENCY = 6.0, 2.0  # latency of an SM with one warp; divided by the number of its warps
_MORE_UNITS = 0.06  # share by which each unit of a warp after the first adds to the time
_SUMS, _MIRRORED_SUMS = 55, 15  # sums, one per token and row tile, that take the time of a unit
_EXCHANGE = 4  # exchange in a cluster, for each of its CTAs
_TABLE = 8  # filling the table of a CTA
_WAVE = 100  # each wave after the first
_TOKENS = 0.1  # reading a token's part of a unit, 256 bytes, from the L2


def candidates(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target, routes: int = 1
) -> Iterator[tuple[CodebookStreamTile, float]]:
    """Tiles for m tokens and weights ``[n, k]``.

    If K is that of several routes, one after the other, a warp has units of one route, and a CTA whole routes.

    The model weighs the units that an SM reads against too few warps to hide latency, sums of many warps, the exchange
    of a cluster, the table that each CTA fills, and waves after the first.

    Raises:
        EmitError: m is not 1 to 32, or no tile of the family fits the shape.
    """
    if not 1 <= m <= 32:
        raise EmitError(f"codebook decode: m is {m}; allowed: 1 to 32")
    machine, arch, units_k, found = target.machine, target.arch, -(-k // 128), False
    alone = _is_alone(problem, arch)
    pace = machine.cycle_bandwidth
    tokens = next(t for t in (1, 8, 16, 24, 32) if t >= m)
    mirrored = problem.mirrored and tokens <= 8
    latency = machine.bandwidth * (_MIRRORED_LATENCY if mirrored else _LATENCY)
    of_a_unit = _MIRRORED_SUMS if mirrored else _SUMS
    row_tiles = -(-n // ROW_TILE)
    sizes = CLUSTER_SIZES if architecture(arch).clusters else (1,)
    of_route = units_k // routes
    for splits, units, ctas in product(sizes, (1, 2, 4) if routes == 1 else (1, 2, 3, 4, 6, 8), (1, 2, 3)):
        if routes > 1 and of_route % units:
            continue
        whole = -(-routes // splits) * of_route if routes > 1 else -(-units_k // splits)
        warps = -(-whole // units)
        if warps * ctas > 32 or (splits > 1 and ctas > 1) or splits > units_k:
            continue
        slots = max(1, machine.clusters_at_once(splits)) * ctas
        wanted = min(-(-row_tiles // slots), MAX_ROW_TILES)
        most = CodebookStreamTile(tokens, wanted, warps, units, splits, alone=ctas == 1 and alone, mirrored=mirrored)
        tile = _largest(problem, most, arch)
        if tile is None or not _fit_together(problem, tile, ctas, arch):
            continue
        waves = -(-row_tiles // (tile.row_tiles * slots))
        read = ctas * tile.row_tiles * warps * units * (1 + latency / (warps * ctas) + _MORE_UNITS * (units - 1))
        sums = pace * (ctas * warps * m * tile.row_tiles / of_a_unit)
        exchange = pace * _EXCHANGE * splits if splits > 1 else 0
        cost = waves * (read + sums + exchange + pace * _TABLE * ctas) + pace * _WAVE * (waves - 1)
        found = True
        yield tile, cost
    if not found:
        raise EmitError(f"codebook decode: no tile for {units_k} units of K, {n} rows and {m} tokens on {arch}")


def _is_alone(problem: CodebookProblem, arch: str) -> bool:
    """Whether a CTA of few tokens that the model puts on an SM has the SM to itself.

    Measured on sm_90a: 0.1 to 1.8 µs of a layer 1280 or 5120 wide, nothing elsewhere; a kernel that rotates its 16-bit
    token loses 0.05, since its table of pairs takes most of the start.
    """
    return architecture(arch).wgmma and (problem.rotates is None or problem.rotates is not problem.x)


def _largest(problem: CodebookProblem, tile: CodebookStreamTile, arch: str) -> CodebookStreamTile | None:
    """The tile with the most row tiles, and the most loads in flight, that fits; None if none fits."""
    prefetch = max(1, min(3, 32 // (tile.warps * tile.units)))
    for row_tiles in range(tile.row_tiles, 0, -1):
        for ahead in range(min(prefetch, row_tiles), 0, -1):
            smaller = replace(tile, row_tiles=row_tiles, prefetch=ahead)
            if holds(stream.CONSTRAINTS, problem, smaller, arch):
                return smaller
    return None


def _fit_together(problem: CodebookProblem, tile: CodebookStreamTile, ctas: int, arch: str) -> bool:
    """Whether an SM runs ``ctas`` CTAs at once. Each CTA takes 1 KB of shared memory more than the tile's."""
    return ctas == 1 or (
        ctas * (stream.smem_bytes(problem, tile) + 1024) <= architecture(arch).sm_smem_bytes
        and ctas * 32 * tile.warps * (stream.registers(problem, tile) + 8) <= architecture(arch).registers
    )


def rounds_candidates(
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
    latency, pace = _LATENCY * machine.bandwidth, machine.cycle_bandwidth
    tokens = next(t for t in (1, 8, 16) if t >= m)
    all_tiles = -(-n // ROW_TILE)

    def cost(tile: CodebookRoundsTile) -> float:
        rounds = -(-units_k // tile.warps)
        read = tile.warps * rounds * (tile.row_tiles + _TOKENS * m * problem.x.bits / 16)
        sums = pace * (tile.warps * m * tile.row_tiles / _SUMS)

        def together(ctas: int) -> float:
            return ctas * (read * (1 + latency / (tile.warps * tile.row_tiles * ctas)) + sums)

        full, rest = divmod(-(-all_tiles // tile.row_tiles), tile.ctas * target.sm_count)
        return full * together(tile.ctas) + (together(-(-rest // target.sm_count)) if rest else 0.0)

    for row_tiles, warps, ctas in product((1, 2, 3, 4), (4, 8, 16), (1, 2, 3, 4)):
        tile = CodebookRoundsTile(tokens, row_tiles, warps, ctas)
        if holds(codebook_rounds.CONSTRAINTS, problem, tile, target.arch):
            yield tile, cost(tile)
