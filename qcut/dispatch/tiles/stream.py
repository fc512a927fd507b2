"""Chooses tiles for few tokens and int8 weights by a model of the memory.

The model prefers one wave of CTAs, few rounds of loads, and many loads in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qcut.dispatch import closed
from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import CLUSTER_SIZES, Machine
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import EmitError
from qcut.emitters.families import INT8_STREAM, W8A16_STREAM
from qcut.emitters.gemm.problem import K_MAX, GemmProblem
from qcut.emitters.stream import w8a8, w8a16
from qcut.emitters.stream.int8 import UNIT_COLUMNS, register_limit
from qcut.emitters.stream.w8a8 import Tokens, W8A8Problem, W8A8Tile
from qcut.emitters.stream.w8a16 import W8A16Tile

# Of an H200. All but the memory's rate are times of an SM's instructions, which a higher clock shortens.
_BYTES_PER_NS = 33.5
"""Bytes of weights per ns for each SM, where all SMs read: 4.43 TB/s over 132 SMs."""
_UNITS_IN_FLIGHT = 40
"""Units of weights on their way that keep the memory busy."""
_ROUND_NS = 300.0
"""Time in ns of a round: reading the tokens of other columns."""
_CTA_NS = 300.0
"""Time in ns to sum over warps and write, where another CTA follows on the SM."""
_CLUSTER_NS = 700.0
"""Time in ns to sum over a cluster's CTAs."""
_MOST_TOKENS = 16
"""Int8 tokens up to which streaming is faster than the tiled kernels with weights of any size."""
_SMALL_WEIGHTS = 2 << 20
"""Bytes of weights up to which it is for as many tokens as the kernel takes."""
_TOKEN_BYTES_PER_NS = 50.0
"""Bytes of int8 tokens per ns that each SM reads, where all SMs read the same."""
_SUM_BYTES_PER_NS = 200.0
"""Bytes of warps' sums per ns that an SM adds in shared memory."""


class Cut(NamedTuple):
    """How weights are divided: see `qcut.emitters.stream.int8.Int8StreamTile`."""

    row_tiles: int
    warps: int
    units: int
    prefetch: int
    splits: int


class FewTokens(NamedTuple):
    """The kernel of ``int8_stream`` for a product of few tokens.

    Attributes:
        problem: its types, tokens and epilogue.
        tile: its tile.
        ns: time in ns that the model expects.
    """

    problem: W8A8Problem
    tile: W8A8Tile
    ns: float


def few_tokens(
    problem: GemmProblem,
    m: int,
    n: int,
    k: int,
    target: Target,
    tokens: Tokens = "none",
    *,
    aligned: bool = True,
    absmax: bool = False,
) -> FewTokens | None:
    """The kernel that streams int8 weights past m tokens, or None where it cannot, or where tiled kernels are faster.

    Args:
        problem: of the product, whose tokens are int8.
        m: rows of D.
        n: columns of D.
        k: summed over, with the operands' padding where tokens are int8.
        target: the GPU.
        tokens: how tokens are given and quantized, see `qcut.emitters.stream.w8a8`.
        aligned: whether rows of tokens start at multiples of 16 bytes.
        absmax: whether the kernel also computes the largest magnitude of each row of its result.
    """
    if problem.layouts != "tnt" or problem.alignment_k % 16 or m > most_tokens(n, k):
        return None
    few = W8A8Problem(tokens, problem.epilogue.out, problem.epilogue, aligned, absmax)
    if target.closed and closed.covers(problem) and not closed.covers(few):
        return None
    if not w8a8.is_legal(few, m, k, target.arch):
        return None
    n, k, like = closed.bounded(n, k, target, known=closed.is_usual(few))
    return FewTokens(few, *_int8(few, m, n, min(k, K_MAX), like))


def most_tokens(n: int, k: int) -> int:
    """Tokens up to which streaming weights ``[n, k]`` is faster than the tiled kernels."""
    return w8a8.MAX_TOKENS if n * k <= _SMALL_WEIGHTS else _MOST_TOKENS


def int8_tile(problem: W8A8Problem, m: int, n: int, k: int, target: Target) -> W8A8Tile:
    """The tile of ``int8_stream`` for m tokens and weights ``[n, k]``.

    Raises:
        EmitError: m is more than the kernel holds (`qcut.emitters.stream.w8a8.tokens_of`), K beyond the exact range, or
            the family's constraints refuse the problem.
    """
    return _int8(problem, m, n, k, target)[0]


def _int8(problem: W8A8Problem, m: int, n: int, k: int, target: Target) -> tuple[W8A8Tile, float]:
    """`int8_tile`, and the time in ns that the model expects."""
    tokens, halves = w8a8.tokens_of(problem, m, k), problem.epilogue.halves

    def best(common_sums: bool) -> tuple[W8A8Tile, float]:
        def tile_of(cut: Cut) -> W8A8Tile:
            return W8A8Tile(cut.row_tiles, cut.warps, cut.units, cut.prefetch, tokens, cut.splits, common_sums)

        def fits(cut: Cut, ctas: int) -> bool:
            tile = tile_of(cut)
            smem = ctas * w8a8.smem_bytes(problem, tile)
            registers = w8a8.registers(problem, tile, target.arch)
            return registers <= register_limit(ctas * cut.warps) and smem <= architecture(target.arch).smem_bytes

        # Several tiles of tokens make a cluster's sums dear: it lost at every shape that was measured.
        clusters = tokens <= w8a8.MAX_ROWS and not halves
        cuts = (
            (cut, ns + _tokens_ns(tokens, k, cut, common_sums, target))
            for cut, ns in _cuts(n, k, target, fits, clusters=clusters)
        )
        cut, ns = min(cuts, key=lambda one: one[1], default=(Cut(1, 1, 1, 1, 1), float("inf")))
        return tile_of(cut), ns

    kinds = (False,) if tokens <= w8a8.MAX_ROWS else (False, True)
    tile, ns = min((best(common_sums) for common_sums in kinds), key=lambda one: one[1])
    INT8_STREAM.validate(problem, tile, target.arch)
    return tile, ns


def _tokens_ns(tokens: int, k: int, cut: Cut, common_sums: bool, target: Target) -> float:
    """Time in ns that more than eight int8 tokens take beside the weights: to read them, and to sum over warps."""
    if tokens <= w8a8.MAX_ROWS:
        return 0.0
    read = tokens * k / cut.splits / _TOKEN_BYTES_PER_NS
    sums = 0.0 if common_sums else cut.warps * tokens * 16 * cut.row_tiles * 4 / _SUM_BYTES_PER_NS
    return (read + sums) / target.machine.clock


def w8a16_tile(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> W8A16Tile:
    """The tile of ``w8a16_stream`` for m tokens and weights ``[n, k]``.

    Raises:
        EmitError: m is more than `qcut.emitters.stream.w8a16.MAX_TOKENS`, or the family's constraints refuse the
            problem.
    """
    if not 1 <= m <= w8a16.MAX_TOKENS:
        raise EmitError(f"{W8A16_STREAM.name}: {m} tokens; allowed are 1 to {w8a16.MAX_TOKENS}")
    tokens = next(size for size in w8a16.TOKENS if m <= size)

    def tile_of(cut: Cut) -> W8A16Tile:
        return W8A16Tile(cut.row_tiles, cut.warps, cut.units, cut.prefetch, tokens, cut.splits)

    def fits(cut: Cut, ctas: int) -> bool:
        tile = tile_of(cut)
        smem = ctas * w8a16.smem_bytes(problem, tile)
        registers = w8a16.registers(tile)
        return registers <= register_limit(ctas * cut.warps) and smem <= architecture(target.arch).smem_bytes

    tile = tile_of(_best_cut(n, k, target, fits))
    W8A16_STREAM.validate(problem, tile, target.arch)
    return tile


def _best_cut(n: int, k: int, target: Target, fits: Callable[[Cut, int], bool]) -> Cut:
    """The cut of weights ``[n, k]`` that the model expects to be fastest; see `_cuts`."""
    return min(_cuts(n, k, target, fits), key=lambda one: one[1], default=(Cut(1, 1, 1, 1, 1), 0.0))[0]


def _cuts(
    n: int, k: int, target: Target, fits: Callable[[Cut, int], bool], *, clusters: bool = True
) -> Iterator[tuple[Cut, float]]:
    """Cuts of weights ``[n, k]``, over clusters if wanted, and the nanoseconds that the model expects of each.

    Two CTAs on one SM hide each other's start and end; they are used where each reads its part of K in one round.
    ``fits`` says whether registers and shared memory of an SM hold a given number of CTAs with a cut.
    """
    machine = target.machine
    for splits in CLUSTER_SIZES if clusters and architecture(target.arch).clusters else (1,):
        at_once = machine.clusters_at_once(splits)
        for units in (1, 2):
            for ctas in (1, 2) if splits == 1 else (1,):
                if at_once and (one := _one_cut(n, k, splits, units, ctas, at_once, machine, fits)) is not None:
                    yield one


def _one_cut(
    n: int,
    k: int,
    splits: int,
    units: int,
    ctas: int,
    at_once: int,
    machine: Machine,
    fits: Callable[[Cut, int], bool],
) -> tuple[Cut, float] | None:
    """One of `_cuts`, for some splits, units and CTAs of an SM; None where two CTAs are not taken."""
    units_k, tiles_n = -(-k // UNIT_COLUMNS), -(-n // 16)
    in_flight = math.ceil(_UNITS_IN_FLIGHT * machine.bandwidth)
    most = max((w for w in range(1, 33) if fits(Cut(1, w, units, 1, splits), ctas)), default=1)
    wanted = -(-units_k // (splits * units))
    warps = -(-wanted // -(-wanted // most))  # in equal rounds
    rounds = -(-units_k // (splits * warps * units))
    if ctas > 1 and rounds > 1:
        return None
    for waves in range(1, 1 + tiles_n):
        row_tiles = -(-tiles_n // (waves * at_once * ctas))
        prefetch = min(row_tiles, -(-in_flight // (warps * units * ctas)))
        while prefetch > 1 and not fits(Cut(row_tiles, warps, units, prefetch, splits), ctas):
            prefetch -= 1
        cut = Cut(row_tiles, warps, units, prefetch, splits)
        if fits(cut, ctas):
            break
    unit_bytes = 16 * UNIT_COLUMNS
    of_an_sm = waves * ctas * row_tiles * rounds * units * min(warps, wanted) * unit_bytes
    together_ns = tiles_n * units_k * unit_bytes / (_BYTES_PER_NS * machine.bandwidth * at_once * splits)
    read_ns = max(together_ns, of_an_sm / machine.sm_bytes_per_ns)
    ctas_ns = waves * (rounds * _ROUND_NS + _CTA_NS) / ctas / machine.clock
    return cut, read_ns + ctas_ns + _CLUSTER_NS * (splits > 1) / machine.clock
