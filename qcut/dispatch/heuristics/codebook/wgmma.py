"""Tiles of ``codebook_wgmma`` and ``codebook_stream_wgmma``: of the latter one for decode, a menu for prefill.

Source: constants fitted to layers of 64 to 1,024 tokens, timed on an H200 at 1280x1280, 5120x1280, 1280x5120,
4096x4096, 14336x4096 and 4096x14336; those of decode to products of 16 to 64 tokens at these, 6144x4096 and 28672x4096.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import CLUSTER_SIZES
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.wgmma import CODEBOOK_WGMMA, ROWS, CodebookWgmmaTile
from qcut.emitters.core.constraints import holds
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.stream.codebook_wgmma import CODEBOOK_STREAM_WGMMA, CONSTRAINTS, GROUP_ROWS, CodebookStreamWgmmaTile

DECODE_TOKENS = 64
"""Most tokens of a step, for which one tile is made."""


def stream_candidates(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target
) -> Iterator[tuple[CodebookStreamWgmmaTile, float]]:
    """Tiles for m tokens and weights ``[n, k]``; times of up to `DECODE_TOKENS` are in units of weights."""
    if m <= DECODE_TOKENS:
        yield from _few(problem, m, n, k, target)
        return
    for tile in CODEBOOK_STREAM_WGMMA.default_tiles(problem, target.arch):
        yield tile, _stream_cycles(problem, tile, m, n, k, target)


def _few(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target
) -> Iterator[tuple[CodebookStreamWgmmaTile, float]]:
    """The tile with the least work of an SM, chain of units of a warp, and exchange in a cluster.

    Raises:
        EmitError: m is not positive.
    """
    if m < 1:
        raise EmitError(f"codebook decode: m is {m}; allowed: 1 to {DECODE_TOKENS}")
    machine, pace = target.machine, target.machine.cycle_bandwidth
    units_k = -(-k // 128)
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)
    row_groups = -(-n // GROUP_ROWS)

    def is_legal(tile: CodebookStreamWgmmaTile) -> bool:
        return holds(CONSTRAINTS, problem, tile, target.arch)

    def cost(groups: int, splits: int) -> float:
        chain = -(-units_k // splits)
        clusters = -(-row_groups // groups)
        waves = -(-clusters // max(1, machine.clusters_at_once(splits)))
        ends = 2 * splits + 3 * groups
        return waves * (groups * chain + pace * (2.5 * chain + ends)) + pace * 40 * (waves - 1)

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
    yield tile, cost(groups, splits)


class _StreamCost(NamedTuple):
    """Cycles of ``codebook_stream_wgmma``: a unit takes the longer of all groups' products and one group's chain."""

    product: float  # for each product of 64 rows and 8 bits of a token's unit, all groups one after the other
    group: float  # in addition, for each group
    chain: float  # as ``product``, of a single group
    decode: float  # in addition, decoding that a single group cannot hide
    cta: float  # of a CTA, without its units
    output: float  # for each token and group, in a CTA
    exchange: float  # of a CTA whose cluster shares K
    launch: float  # of a launch


_STREAM_F16 = _StreamCost(0.759, 371, 0.85, 747, 2178, 22.4, 853, 0)
_STREAM_S8 = _StreamCost(0.638, 365, 0.412, 759, 1760, 17.9, 400, 0)
_SLOT = 60
"""Cycles of a unit for each group scale after the first."""


def _stream_cycles(
    problem: CodebookProblem, tile: CodebookStreamWgmmaTile, m: int, n: int, k: int, target: Target
) -> float:
    """Estimated time of a launch for a prompt of m tokens, in cycles of an SM."""
    units_k, tokens, slots = -(-k // 128), tile.tokens, _SLOT * (problem.slots - 1)
    units = -(-units_k // tile.splits)
    c = _STREAM_S8 if problem.x is DType.S8 else _STREAM_F16
    products = problem.x.bits / 4 * tokens
    unit = max(tile.groups * (c.product * products + c.group), c.chain * products + c.decode) + slots
    cta = units * unit + c.cta + c.output * tokens * tile.groups + c.exchange * (tile.splits > 1)
    clusters = -(-n // (GROUP_ROWS * tile.groups)) * -(-m // tokens)
    return c.launch + -(-clusters // max(1, target.machine.clusters_at_once(tile.splits))) * cta


class _WgmmaCost(NamedTuple):
    """Cycles of ``codebook_wgmma``."""

    unit: float  # of a unit
    token: float  # of a unit, for each token
    pairs_unit: float  # as ``unit``, with a table of pairs
    pairs_token: float  # as ``token``, with a table of pairs
    tile: float  # of a tile, without its units
    output: float  # of a tile, for each token
    exchange: float  # for each token of a tile whose cluster shares K
    pair: float  # of a tile of a cluster that shares tokens
    launch: float  # of a launch


_WGMMA_F16 = _WgmmaCost(644, 6.04, 915, 6.52, 0, 6.3, 41, 50, 3043)
_WGMMA_S8 = _WgmmaCost(974, 1.05, 1160, 1.05, 494, 22.5, 18, 916, 2800)


def candidates(
    problem: CodebookProblem, m: int, n: int, k: int, target: Target
) -> Iterator[tuple[CodebookWgmmaTile, float]]:
    """The menu, for m tokens and weights ``[n, k]``."""
    for tile in CODEBOOK_WGMMA.default_tiles(problem, target.arch):
        yield tile, cycles(problem, tile, m, n, k, target)


def cycles(problem: CodebookProblem, tile: CodebookWgmmaTile, m: int, n: int, k: int, target: Target) -> float:
    """Estimated time of a launch for m tokens."""
    units_k, tokens, slots = -(-k // 128), tile.tokens, _SLOT * (problem.slots - 1)
    units = -(-units_k // tile.splits)
    w = _WGMMA_S8 if problem.x is DType.S8 else _WGMMA_F16
    unit = (w.pairs_unit + w.pairs_token * tokens if tile.pairs else w.unit + w.token * tokens) + slots
    cycles = units * unit + w.tile + w.output * tokens + w.pair * (tile.cluster - 1)
    cycles += w.exchange * tokens * (tile.splits > 1)
    clusters = -(-n // (ROWS * tile.cluster)) * -(-m // tokens)
    return w.launch + -(-clusters // max(1, target.machine.clusters_at_once(tile.cluster * tile.splits))) * cycles
