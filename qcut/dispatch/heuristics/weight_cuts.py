"""Divides int8 weights among CTAs and warps for few tokens, by a model of the memory.

The model prefers one wave of CTAs, few rounds of loads, and many loads in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import CLUSTER_SIZES, Machine
from qcut.emitters.core.arch import architecture
from qcut.emitters.stream.int8 import UNIT_COLUMNS

# Of an H200. All but the memory's rate are times of an SM's instructions, which a higher clock shortens.
_BYTES_PER_NS = 33.5
"""Bytes of weights per ns for each SM while all SMs read: 4.43 TB/s over 132 SMs."""
_UNITS_IN_FLIGHT = 40
"""Units of weights on their way that keep the memory busy."""
_ROUND_NS = 300.0
"""Time in ns of a round: reading the tokens of other columns."""
_CTA_NS = 300.0
"""Time in ns to sum over warps and write, if another CTA follows on the SM."""
_CLUSTER_NS = 700.0
"""Time in ns to sum over a cluster's CTAs."""


class Cut(NamedTuple):
    """How weights are divided: see `qcut.emitters.stream.int8.Int8StreamTile`."""

    row_tiles: int
    warps: int
    units: int
    prefetch: int
    splits: int


def cuts(
    n: int, k: int, target: Target, fits: Callable[[Cut, int], bool], *, clusters: bool = True, copies: int = 1
) -> Iterator[tuple[Cut, float, int]]:
    """Cuts of weights ``[n, k]``, over clusters if wanted, and the nanoseconds that the model expects of each.

    Two CTAs on one SM hide each other's start and end; they are used if each reads its part of K in one round.

    Args:
        n: rows of a weight.
        k: columns.
        target: the GPU.
        fits: whether registers and shared memory of an SM hold a given number of CTAs with a cut.
        clusters: whether K may be divided over clusters.
        copies: weights of one launch; no CTA has rows of two.

    Returns:
        Cuts, their times, and how often the model counts what tokens and sums over a cluster add: once with one weight,
        else in every wave.
    """
    machine = target.machine
    for splits in CLUSTER_SIZES if clusters and architecture(target.arch).clusters else (1,):
        at_once = machine.clusters_at_once(splits)
        for units in (1, 2):
            for ctas in (1, 2) if splits == 1 else (1,):
                if at_once:
                    yield from _cuts_of(n, k, splits, units, ctas, at_once, machine, fits, copies)


def _cuts_of(
    n: int,
    k: int,
    splits: int,
    units: int,
    ctas: int,
    at_once: int,
    machine: Machine,
    fits: Callable[[Cut, int], bool],
    copies: int,
) -> Iterator[tuple[Cut, float, int]]:
    """Those of `cuts` for some splits, units and CTAs of an SM: of one weight the first that fits, of several all."""
    units_k, tiles_n = -(-k // UNIT_COLUMNS), -(-n // 16)
    in_flight = math.ceil(_UNITS_IN_FLIGHT * machine.bandwidth)
    most = next((w for w in range(32, 0, -1) if fits(Cut(1, w, units, 1, splits), ctas)), 1)
    wanted = -(-units_k // (splits * units))
    warps = -(-wanted // -(-wanted // most))  # in equal rounds
    rounds = -(-units_k // (splits * warps * units))
    if ctas > 1 and rounds > 1:
        return
    # CTAs of a weight: as many as one wave or several have, or, of several weights, any number.
    step = at_once * ctas if copies == 1 else 1
    for row_tiles, _ in groupby(-(-tiles_n // parts) for parts in range(step, step * tiles_n + 1, step)):
        prefetch = min(row_tiles, -(-in_flight // (warps * units * ctas)))
        while prefetch > 1 and not fits(Cut(row_tiles, warps, units, prefetch, splits), ctas):
            prefetch -= 1
        cut = Cut(row_tiles, warps, units, prefetch, splits)
        if not fits(cut, ctas):
            continue
        waves = -(-(copies * -(-tiles_n // row_tiles)) // (at_once * ctas))
        unit_bytes = 16 * UNIT_COLUMNS
        of_an_sm = waves * ctas * row_tiles * rounds * units * min(warps, wanted) * unit_bytes
        together_ns = copies * tiles_n * units_k * unit_bytes / (_BYTES_PER_NS * machine.bandwidth * at_once * splits)
        read_ns = max(together_ns, of_an_sm / machine.sm_bytes_per_ns)
        ctas_ns = waves * (rounds * _ROUND_NS + _CTA_NS) / ctas / machine.clock
        turns = waves if copies > 1 else 1
        yield cut, read_ns + ctas_ns + turns * _CLUSTER_NS * (splits > 1) / machine.clock, turns
        if copies == 1:
            return
