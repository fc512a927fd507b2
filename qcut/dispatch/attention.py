"""Which form of attention over a cache serves a shape, and in how many parts of the context."""

from __future__ import annotations

from qcut.dispatch.cost_model import MACHINES
from qcut.dispatch.gpus import Target
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.attention.mma import CLUSTERS, MAX_PARTS, TILE, AttentionMma, emit_attention_mma
from qcut.emitters.decoder.attention.simt import AttentionDecode, emit_attention_decode

Attention = AttentionDecode | AttentionMma

_START_CYCLES = 1000
"""Of a CTA, before its first loads."""
_CLUSTER_CYCLES = 1000
"""A cluster adding up its parts."""
_WORKSPACE_CYCLES = 4000
"""Parts meeting in a workspace, and then some for each of them."""
_PART_CYCLES = 20


def emit_attention(desc: Attention) -> KernelSource:
    """Text of one kernel of either form; their arguments are the same."""
    return emit_attention_mma(desc) if isinstance(desc, AttentionMma) else emit_attention_decode(desc)


def select_attention(
    x: DType,
    cache: DType,
    head: int,
    queries: int,
    target: Target,
    *,
    batch: int,
    kv_heads: int,
    context: int,
) -> tuple[Attention, int]:
    """The kernel of a shape, on tensor cores where those take x and the head, and its parts, by `estimated_cycles`.

    Args:
        x: element type of queries.
        cache: of keys and values.
        head: columns of a head.
        queries: of each head of keys.
        target: the GPU.
        batch: sequences.
        kv_heads: heads of keys.
        context: tokens that the cache has room for.

    Raises:
        EmitError: what neither form can be.
    """
    arch, sm_count = target.arch, target.sm_count
    if not AttentionMma.is_legal(x, cache, head, 1, arch):
        simt = AttentionDecode.for_shape(x, cache, head, queries, arch)
        return simt, simt.parts(batch, kv_heads, queries, context, sm_count)
    clusters = [n for n in CLUSTERS if n == 1 or (architecture(arch).clusters and n * TILE <= context)]
    most = max(1, min(MAX_PARTS, context // (2 * TILE)))
    kernels = [AttentionMma.for_shape(x, cache, head, queries, arch, cluster) for cluster in clusters]
    choices = [
        (desc, parts) for desc in kernels for parts in ([desc.cluster] if desc.cluster > 1 else range(1, most + 1))
    ]

    def cycles(choice: tuple[AttentionMma, int]) -> float:
        desc, parts = choice
        return estimated_cycles(desc, parts, desc.places(batch, kv_heads, queries), context, target)

    return min(choices, key=cycles)


def estimated_cycles(desc: AttentionMma, parts: int, places: int, context: int, target: Target) -> float:
    """About how long a launch takes, in cycles, where all sequences fill the context.

    A closed system: what is on its way comes back after the latency, or when the memory, or the SMs that ask it, have
    given what was asked before. CTAs that find no place come when the first ones are done. `places` are the CTAs of a
    part.
    """
    machine, sm_count = MACHINES[target.arch], target.sm_count
    memory = machine.memory
    part_bytes = 2 * context * desc.head * desc.cache.bits / 8 / parts

    def read(ctas: int) -> float:
        flight = ctas * min(part_bytes, desc.flight_bytes)
        bandwidth = min(memory.bytes_per_cycle * sm_count, memory.sm_bytes_per_cycle * min(ctas, sm_count))
        return _START_CYCLES + ctas * part_bytes * (memory.latency_cycles / flight + 1 / bandwidth)

    sms = sm_count * desc.cluster * machine.clusters[desc.cluster] // 132
    slots = desc.resident * sms // desc.cluster * desc.cluster
    waves, rest = divmod(places * parts, slots)
    cycles = waves * read(slots) + (read(rest) if rest else 0.0)
    if parts == 1:
        return cycles
    return cycles + (_CLUSTER_CYCLES if desc.cluster > 1 else _WORKSPACE_CYCLES + _PART_CYCLES * parts)
