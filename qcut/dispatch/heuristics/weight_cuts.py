"""Divides int8 weights among CTAs and warps for few tokens, by a model of the memory.

The model prefers one wave of CTAs, few rounds of loads, and many loads in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    n: int, k: int, target: Target, fits: Callable[[Cut, int], bool], *, clusters: bool = True
) -> Iterator[tuple[Cut, float]]:
    """Cuts of weights ``[n, k]``, over clusters if wanted, and the nanoseconds that the model expects of each.

    Two CTAs on one SM hide each other's start and end; they are used if each reads its part of K in one round.
    ``fits`` tells whether registers and shared memory of an SM hold a given number of CTAs with a cut.
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
    """One of `cuts`, for some splits, units and CTAs of an SM; None if nothing fits, or two CTAs are not taken."""
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
    else:
        return None
    unit_bytes = 16 * UNIT_COLUMNS
    of_an_sm = waves * ctas * row_tiles * rounds * units * min(warps, wanted) * unit_bytes
    together_ns = tiles_n * units_k * unit_bytes / (_BYTES_PER_NS * machine.bandwidth * at_once * splits)
    read_ns = max(together_ns, of_an_sm / machine.sm_bytes_per_ns)
    ctas_ns = waves * (rounds * _ROUND_NS + _CTA_NS) / ctas / machine.clock
    return cut, read_ns + ctas_ns + _CLUSTER_NS * (splits > 1) / machine.clock
