"""Chooses the tiles of products with codebook weights, by a model of each family's time.

Source: measured on an H200; the models' constants rank the measured variants right on 14336x4096, 4096x14336,
4096x4096, 1280x1280 and 5120x1280 (docs/kernel-notes/few-tokens.md).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from qcut.dispatch.cost_model import tile_cycles
from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import CLUSTER_SIZES
from qcut.emitters.codebook import wgmma
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.wgmma import CodebookWgmmaTile
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import holds
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import CODEBOOK_CUTLASS, CODEBOOK_MMA, CODEBOOK_STREAM_WGMMA, CODEBOOK_WGMMA
from qcut.emitters.gemm.problem import TileConfig
from qcut.emitters.stream import codebook as stream
from qcut.emitters.stream import codebook_rounds as stream_rounds
from qcut.emitters.stream import codebook_wgmma as stream_wgmma
from qcut.emitters.stream.codebook import MAX_ROW_TILES, CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.codebook_wgmma import GROUP_ROWS, CodebookStreamWgmmaTile
from qcut.emitters.stream.family import ROW_TILE

# ── few tokens: costs in units of weights that an SM of an H200 reads in the same time ───────────
# Where the memory is slower, fewer units are read in the time of a sum or an exchange.

_LATENCY = 6.0  # latency of an SM with one warp; divided by the number of its warps
_MORE_UNITS = 0.06  # share by which each unit of a warp after the first adds to the time
_SUMS = 55  # sums, one per token and row tile, that take the time of a unit
_EXCHANGE = 4  # exchange in a cluster, for each of its CTAs
_TABLE = 8  # filling the table of a CTA
_WAVE = 100  # each wave after the first
_TOKENS = 0.1  # reading a token's part of a unit, 256 bytes, from the L2


def stream_tile(problem: CodebookProblem, m: int, n: int, units_k: int, target: Target) -> CodebookStreamTile:
    """The tile of ``codebook_stream`` for m tokens, n rows of weights and so many units along K.

    The model weighs the units that an SM reads against too few warps to hide latency, sums of many warps, the exchange
    of a cluster, the table that each CTA fills, and waves after the first.

    Raises:
        EmitError: m is not 1 to 32, or no tile of the family fits the shape.
    """
    if not 1 <= m <= 32:
        raise EmitError(f"codebook decode: m is {m}; allowed: 1 to 32")
    machine, arch = target.machine, target.arch
    latency, pace = _LATENCY * machine.bandwidth, machine.cycle_bandwidth
    tokens = next(t for t in (1, 8, 16, 24, 32) if t >= m)
    row_tiles = -(-n // ROW_TILE)
    best: tuple[float, CodebookStreamTile] | None = None
    sizes = CLUSTER_SIZES if architecture(arch).clusters else (1,)
    for splits, units, ctas in product(sizes, (1, 2, 4), (1, 2, 3)):
        warps = -(-units_k // (splits * units))
        if warps * ctas > 32 or (splits > 1 and ctas > 1) or splits > units_k:
            continue
        slots = max(1, machine.clusters_at_once(splits)) * ctas
        wanted = min(-(-row_tiles // slots), MAX_ROW_TILES)
        tile = _largest(problem, CodebookStreamTile(tokens, wanted, warps, units, splits), arch)
        if tile is None or not _fit_together(problem, tile, ctas, arch):
            continue
        waves = -(-row_tiles // (tile.row_tiles * slots))
        read = ctas * tile.row_tiles * warps * units * (1 + latency / (warps * ctas) + _MORE_UNITS * (units - 1))
        sums = pace * (ctas * warps * m * tile.row_tiles / _SUMS)
        exchange = pace * _EXCHANGE * splits if splits > 1 else 0
        cost = waves * (read + sums + exchange + pace * _TABLE * ctas) + pace * _WAVE * (waves - 1)
        if best is None or cost < best[0]:
            best = cost, replace(tile, alone=ctas == 1 and _is_alone(problem, arch))
    if best is None:
        raise EmitError(f"codebook decode: no tile for {units_k} units of K, {n} rows and {m} tokens on {arch}")
    return best[1]


def _is_alone(problem: CodebookProblem, arch: str) -> bool:
    """Whether a CTA of few tokens that the model puts on an SM shall have the SM to itself.

    Measured on sm_90a: 0.1 to 1.8 µs of a layer 1280 or 5120 wide, nothing elsewhere; a kernel that rotates its 16-bit
    token, whose table of pairs takes most of the start, loses 0.05.
    """
    return architecture(arch).wgmma and (problem.rotates is None or problem.rotates is not problem.x)


def _largest(problem: CodebookProblem, tile: CodebookStreamTile, arch: str) -> CodebookStreamTile | None:
    """The tile with the most row tiles, and the most loads in flight, that fits; None where none fits."""
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


def rounds_tile(problem: CodebookProblem, m: int, n: int, units_k: int, target: Target) -> CodebookRoundsTile:
    """The tile of ``codebook_stream_rounds`` for m tokens, n rows of weights and so many units along K.

    The model weighs the units that an SM reads, and the tokens that each of its CTAs reads for them, against too few
    warps to hide latency and the sums of many warps. A tile with the most CTAs that an SM holds is taken for each cut.

    Raises:
        EmitError: m is not 1 to 16.
    """
    if not 1 <= m <= 16:
        raise EmitError(f"codebook decode: m is {m}; allowed: 1 to 16")
    machine = target.machine
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

    legal = [
        tile
        for row_tiles, warps, ctas in product((1, 2, 3, 4), (4, 8, 16), (1, 2, 3, 4))
        if holds(
            stream_rounds.CONSTRAINTS, problem, tile := CodebookRoundsTile(tokens, row_tiles, warps, ctas), target.arch
        )
    ]
    return min(legal, key=cost)


def stream_wgmma_tile(
    problem: CodebookProblem, m: int, n: int, units_k: int, target: Target
) -> CodebookStreamWgmmaTile:
    """The tile of ``codebook_stream_wgmma`` with the least cost.

    The cost adds the work of an SM, the chain of units of a warp, and the exchange in a cluster.

    Raises:
        EmitError: m is not 1 to 64.
    """
    if not 1 <= m <= 64:
        raise EmitError(f"codebook decode: m is {m}; allowed: 1 to 64")
    machine, pace = target.machine, target.machine.cycle_bandwidth
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)
    row_groups = -(-n // GROUP_ROWS)

    def is_legal(tile: CodebookStreamWgmmaTile) -> bool:
        return holds(stream_wgmma.CONSTRAINTS, problem, tile, target.arch)

    def cost(groups: int, splits: int) -> float:
        chain = -(-units_k // splits)
        clusters = -(-row_groups // groups)
        waves = -(-clusters // max(1, machine.clusters_at_once(splits)))
        return waves * (groups * chain + pace * (2 * chain + 3.5 * splits)) + pace * 40 * (waves - 1)

    groups, splits = min(
        (
            (g, s)
            for g in range(1, 6)
            for s in CLUSTER_SIZES
            if s <= units_k and is_legal(CodebookStreamWgmmaTile(tokens, g, s, 3, 1))
        ),
        key=lambda choice: cost(*choice),
    )
    chain = -(-units_k // splits)
    tile = CodebookStreamWgmmaTile(tokens, groups, splits, max(3, min(chain, 16)), min(4, chain), alone=True)
    while not is_legal(replace(tile, stages=3)):
        tile = replace(tile, prefetch=tile.prefetch - 1)
    while not is_legal(tile):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def is_wgmma_better(problem: CodebookProblem, m: int, n: int, units_k: int, target: Target) -> bool:
    """Whether ``codebook_stream_wgmma`` is faster than ``codebook_stream`` on sm_90a.

    The wgmma kernel is faster from 9 tokens on where ``codebook_stream`` would take a cluster, from 17 tokens on where
    a CTA of ``codebook_stream`` has several row tiles, and from 33 tokens on everywhere.
    """
    if m <= 8:
        return False
    if m > 32:
        return True
    try:
        tile = stream_tile(problem, m, n, units_k, target)
    except EmitError:
        return True
    return tile.splits > 1 or (m > 16 and tile.row_tiles > 1)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────

CUTLASS_TOKENS = 1024
"""Fewest tokens that ``codebook_cutlass`` serves."""


def prompt_menu(problem: CodebookProblem) -> tuple[CodebookStreamWgmmaTile | CodebookWgmmaTile, ...]:
    """The tiles that `prompt_tile` chooses from."""
    return (*CODEBOOK_WGMMA.default_tiles(problem, "sm_90a"), *CODEBOOK_STREAM_WGMMA.default_tiles(problem, "sm_90a"))


def prompt_tile(
    problem: CodebookProblem, m: int, n: int, units_k: int, target: Target
) -> CodebookStreamWgmmaTile | CodebookWgmmaTile:
    """The tile of the menus of ``codebook_stream_wgmma`` and ``codebook_wgmma`` with the least `prompt_cycles`."""
    return min(prompt_menu(problem), key=lambda tile: prompt_cycles(problem, tile, m, n, units_k, target))


class _StreamCost(NamedTuple):
    """Cycles of ``codebook_stream_wgmma``: a unit takes the longer of all groups' products and one group's chain.

    Attributes:
        product: for each product of 64 rows and 8 bits of a token's unit, all groups one after the other.
        group: for each group beside.
        chain: as ``product``, of one group alone.
        decode: beside, decoding that one group cannot hide.
        cta: of a CTA, beside its units.
        output: for each token and group, in a CTA.
        exchange: of a CTA whose cluster shares K.
        launch: of a launch.
    """

    product: float
    group: float
    chain: float
    decode: float
    cta: float
    output: float
    exchange: float
    launch: float


class _WgmmaCost(NamedTuple):
    """Cycles of ``codebook_wgmma``.

    Attributes:
        unit: of a unit.
        token: of a unit, for each token.
        pairs_unit: as ``unit``, with a table of pairs.
        pairs_token: as ``token``, with a table of pairs.
        tile: of a tile, beside its units.
        output: of a tile, for each token.
        exchange: for each token of a tile whose cluster shares K.
        pair: of a tile of a cluster that shares tokens.
        launch: of a launch.
    """

    unit: float
    token: float
    pairs_unit: float
    pairs_token: float
    tile: float
    output: float
    exchange: float
    pair: float
    launch: float


_STREAM_F16 = _StreamCost(0.985, 221, 0.76, 626, 2900, 15.4, 375, 0)
_STREAM_S8 = _StreamCost(0.638, 365, 0.412, 759, 1760, 17.9, 400, 0)
_WGMMA_F16 = _WgmmaCost(1194, 4.89, 1099, 4.87, 0, 18.3, 18, 100, 3900)
_WGMMA_S8 = _WgmmaCost(974, 1.05, 1160, 1.05, 494, 22.5, 18, 916, 2800)
_SLOT = 60
"""Cycles of a unit for each norm after the first."""


def prompt_cycles(
    problem: CodebookProblem,
    tile: CodebookStreamWgmmaTile | CodebookWgmmaTile,
    m: int,
    n: int,
    units_k: int,
    target: Target,
) -> float:
    """Estimated time of a launch for a prompt of m tokens, in cycles of an SM.

    Source: constants fitted to layers of 64 to 1,024 tokens, timed on an H200 at 1280x1280, 5120x1280, 1280x5120,
    4096x4096, 14336x4096 and 4096x14336.
    """
    s8 = problem.x is DType.S8
    slots = _SLOT * (problem.slots - 1)
    units, tokens = -(-units_k // tile.splits), tile.tokens
    at_once = target.machine.clusters_at_once
    if isinstance(tile, CodebookStreamWgmmaTile):
        c = _STREAM_S8 if s8 else _STREAM_F16
        products = problem.x.bits / 4 * tokens
        unit = max(tile.groups * (c.product * products + c.group), c.chain * products + c.decode) + slots
        cta = units * unit + c.cta + c.output * tokens * tile.groups + c.exchange * (tile.splits > 1)
        clusters = -(-n // (GROUP_ROWS * tile.groups)) * -(-m // tokens)
        return c.launch + -(-clusters // max(1, at_once(tile.splits))) * cta
    w = _WGMMA_S8 if s8 else _WGMMA_F16
    unit = (w.pairs_unit + w.pairs_token * tokens if tile.pairs else w.unit + w.token * tokens) + slots
    cycles = units * unit + w.tile + w.output * tokens + w.pair * (tile.cluster - 1)
    cycles += w.exchange * tokens * (tile.splits > 1)
    clusters = -(-n // (wgmma.ROWS * tile.cluster)) * -(-m // tokens)
    return w.launch + -(-clusters // max(1, at_once(tile.cluster * tile.splits))) * cycles


def cutlass_tile(problem: CodebookProblem, m: int, n: int, units_k: int, target: Target) -> TileConfig | None:
    """The tile of ``codebook_cutlass``'s menu with the least cycles; None where the family is not the fastest."""
    menu = CODEBOOK_CUTLASS.menu(problem, target.arch)
    if m < CUTLASS_TOKENS or not menu:
        return None
    bits = problem.epilogue.out.bits
    return min(menu, key=lambda tile: tile_cycles(tile, bits, m, n, 128 * units_k, target))


def mma_tile(problem: CodebookProblem, m: int, n: int, target: Target) -> TileConfig:
    """The tile of ``codebook_mma``'s menu with the least work for the busiest SM, products and decoding counted.

    Raises:
        EmitError: the family's constraints refuse the problem.
    """
    macs = target.machine.mma_macs(problem.x.bits)

    def work(tile: TileConfig) -> tuple[float, int]:
        (bm, bn, _), (wm, wn, _) = tile.threadblock_shape, tile.warp_shape
        warps = bm // wm * (bn // wn)
        # In products of 16 x 8 of an H200: a warp's decoding of 16 rows takes about as long as three of them; tokens
        # and weights come from the L2 at the rate of the tile's sides.
        products = bn // 16 * (bm // 8) / macs + 3 * bn // 16 * (bm // wm) + (bm + bn) / 8
        slowdown = 1.0 if warps >= 8 else 1.15 if warps >= 4 else 2.0
        waves = -(-CODEBOOK_MMA.grid(tile, n)(m)[0] // target.sm_count)
        return waves * products * slowdown, tile.stages

    tiles = CODEBOOK_MMA.default_tiles(problem, target.arch)
    if not tiles:
        CODEBOOK_MMA.validate(problem, TileConfig((16, 64, 128), (16, 16, 128), 2), target.arch)
    return min(tiles, key=work)
