"""Chooses the form of attention over a cache for a shape, and the number of parts that divide the context."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

from qcut.dispatch import ahead_of_time
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import attention
from qcut.emitters.attention.mma import CLUSTERS, TILE, AttentionMma
from qcut.emitters.attention.prompt import tiles
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.prompt_wgmma import PARTS, PromptWgmma
from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.append import RotateAndAppend
from qcut.jit.debug import logs_choice

Attention = AttentionDecode | AttentionMma
PromptKernel = PromptMma | PromptWgmma


@logs_choice
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
    values: DType | None = None,
    scores: Scores = PLAIN,
) -> tuple[Attention, int]:
    """Choose the kernel of a shape and its number of parts by the model of `qcut.dispatch.heuristics.attention`.

    The kernel uses tensor cores if these take the queries' type and the head's size. It is shortened to the tiles
    that its warps have, except among ahead-of-time kernels, where one kernel serves every context.

    Args:
        x: element type of queries.
        cache: element type of keys.
        head: columns of a head.
        queries: query heads for each head of keys.
        target: the GPU.
        batch: number of sequences.
        kv_heads: number of heads of keys.
        context: tokens that the cache has room for, or, if fewer, those that a window leaves or that
            sequences have at most.
        values: element type of values; None: that of keys.
        scores: a window, a softcap, sinks.

    Raises:
        EmitError: neither form serves the shape.
    """
    arch = target.arch
    group = ahead_of_time.attention_queries(queries, target)
    if not AttentionMma.is_legal(x, cache, head, 1, arch, values=values) and DType.U4 not in (cache, values):
        simt = AttentionDecode.for_shape(x, cache, head, group, arch, scores)
        return simt, simt.parts(batch, kv_heads, queries, context, target.sm_count)
    clusters = ahead_of_time.has_clusters(head, target)
    sizes = [n for n in CLUSTERS if n == 1 or (clusters and n * TILE <= context)]
    kernels = [AttentionMma.for_shape(x, cache, head, group, arch, cluster, values, scores) for cluster in sizes]
    found = attention.candidates(kernels, batch, kv_heads, queries, context, target)
    (desc, parts), _ = min(found, key=itemgetter(1))
    return (desc if target.ahead_of_time else desc.shortened(-(-context // parts))), parts


def check_heads(x: DType, cache: DType, head: int, target: Target, values: DType | None = None) -> None:
    """Check that kernels fill and read a cache of heads of ``head`` columns; types as of `select_attention`.

    Raises:
        EmitError: there are none.
    """
    RotateAndAppend(x, cache, head, "half", target.arch, values=values)
    select_attention(x, cache, head, 1, target, batch=1, kv_heads=1, context=TILE, values=values)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def prompt_attention_menu(
    x: DType, cache: DType, head: int, arch: str, values: DType | None = None, scores: Scores = PLAIN
) -> tuple[PromptKernel, ...]:
    """Every kernel that `select_prompt_attention` chooses from, whatever the sizes; none for other types and heads."""
    if PromptWgmma.is_legal(x, cache, head, arch, values=values):
        small = PromptWgmma.for_shape(x, cache, head, arch, 1, values=values, scores=scores)
        wide = PromptWgmma.for_shape(x, cache, head, arch, values=values, scores=scores)
        return (wide, *(replace(small, parts=parts) for parts in PARTS))
    if PromptMma.is_legal(x, cache, head, arch, values):
        return (PromptMma.for_shape(x, cache, head, arch, values, scores),)
    return ()


@logs_choice
def select_prompt_attention(
    x: DType,
    cache: DType,
    head: int,
    target: Target,
    *,
    sequences: int,
    length: int,
    kv_heads: int,
    group: int,
    context: int,
    values: DType | None = None,
    scores: Scores = PLAIN,
) -> PromptKernel | None:
    """Choose the kernel of a chunk's shape; None: none of them takes the types or the head's size.

    Few tiles are smaller ones; a cluster shares the positions of very few.

    Args:
        x: element type of queries.
        cache: element type of keys.
        head: columns of a head.
        target: the GPU.
        sequences: number of sequences.
        length: tokens of each sequence's chunk.
        kv_heads: number of heads of keys.
        group: query heads for each head of keys.
        context: tokens that the cache has room for, or, if fewer, those that a window leaves a chunk.
        values: element type of values; None: that of keys.
        scores: a window, a softcap, sinks.
    """
    menu = prompt_attention_menu(x, cache, head, target.arch, values, scores)
    first = menu[0] if menu else None
    if not isinstance(first, PromptWgmma) or tiles(first.rows, sequences, length, kv_heads, group) >= target.sm_count:
        return first
    small = [kernel for kernel in menu if isinstance(kernel, PromptWgmma) and kernel.groups == 1]
    count = tiles(small[0].rows, sequences, length, kv_heads, group)
    fitting = [
        kernel
        for kernel in small
        if kernel.parts == 1
        or (count <= target.machine.clusters_at_once(kernel.parts) and 2 * kernel.parts * kernel.keys <= context)
    ]
    return fitting[-1]
