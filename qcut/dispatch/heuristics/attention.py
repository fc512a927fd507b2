"""Kernels of decode attention with tensor cores, and the parts that divide the context, with times in cycles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qcut.dispatch.gpus import Target
from qcut.emitters.attention.mma import MAX_PARTS, TILE, AttentionMma
from qcut.emitters.core.source import DType

# Of an H200. Waits for the memory take more cycles at a higher clock.
_START_CYCLES = 1000
"""Cycles of a CTA before its first loads."""
_LATENCY_CYCLES = 1400
"""Cycles from a warp's loads to its next loads on an idle GPU: 800 until data arrive, then products."""
_ARRIVAL_CYCLES = 800
_BYTES_PER_CYCLE = 20
"""Bytes of a cache per cycle for each SM while all SMs read."""
_SM_BYTES_PER_CYCLE = 44
"""Bytes of a cache per cycle that one SM reads at most."""
_NIBBLE_BYTES_PER_CYCLE = 13
"""Bytes of a 4-bit cache per cycle that one SM unpacks."""
_CLUSTER_CYCLES = 1000
"""Cycles in which a cluster adds up its parts."""
_WORKSPACE_CYCLES = 4000
"""Cycles in which parts meet in a workspace, before the cycles that each part adds."""
_PART_CYCLES = 20


def candidates(
    kernels: Iterable[AttentionMma], batch: int, kv_heads: int, queries: int, context: int, target: Target
) -> Iterator[tuple[tuple[AttentionMma, int], float]]:
    """Kernels, each with its numbers of parts: those of its cluster, or any if it uses no cluster."""
    most = max(1, min(MAX_PARTS, context // (2 * TILE)))
    for desc in kernels:
        places = desc.places(batch, kv_heads, queries)
        for parts in range(1, most + 1) if desc.cluster == 1 else (desc.cluster,):
            yield (desc, parts), cycles(desc, parts, places, context, target)


def cycles(desc: AttentionMma, parts: int, places: int, context: int, target: Target) -> float:
    """Estimated cycles of a launch with sequences that fill the context.

    The model is a closed system: loads return after the latency, or when the memory, or the SMs that ask for them,
    have served the loads before. CTAs that find no room start when the first CTAs are done. ``places`` is the number
    of CTAs of a part.
    """
    machine, sm_count = target.machine, target.sm_count
    rate = _BYTES_PER_CYCLE * machine.cycle_bandwidth
    latency = _LATENCY_CYCLES + _ARRIVAL_CYCLES * (machine.clock - 1)
    part_bytes = context * desc.row_bytes / parts

    most = _NIBBLE_BYTES_PER_CYCLE if DType.U4 in (desc.cache, desc.values) else _SM_BYTES_PER_CYCLE

    def read(ctas: int) -> float:
        flight = ctas * min(part_bytes, desc.flight_bytes)
        bandwidth = min(rate * sm_count, most * min(ctas, sm_count))
        return _START_CYCLES + ctas * part_bytes * (latency / flight + 1 / bandwidth)

    sms = desc.cluster * machine.clusters_at_once(desc.cluster)
    slots = desc.resident * sms // desc.cluster * desc.cluster
    waves, rest = divmod(places * parts, slots)
    cycles = waves * read(slots) + (read(rest) if rest else 0.0)
    if parts == 1:
        return cycles
    if desc.cluster > 1:
        return cycles + _CLUSTER_CYCLES
    return cycles + (_WORKSPACE_CYCLES + _PART_CYCLES * parts) * machine.clock
