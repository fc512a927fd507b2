"""Rows of the conformance suite: attention of steps and of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qcut.emitters.attention import append, append_tokens, mma, prompt_mma, prompt_wgmma, scores, simt
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.append_tokens import AttentionAppendTokens
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.prompt_wgmma import PromptWgmma
from qcut.emitters.attention.scores import FORMS, PLAIN, SUNK, Scores
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.core.source import DType, KernelSource
from tests.emitters.conformance.row import Row

ARCH = "sm_90a"
F16, BF16, F32, S8, U4 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.U4
DECODE = AttentionDecode(F16, F16, 128, 4, ARCH)
MMA = AttentionMma(F16, F16, 128, 4, ARCH, cluster=8)
PROMPT_WGMMA = PromptWgmma(F16, F16, 128, ARCH)
PROMPT_MMA = PromptMma(F16, F16, 128, "sm_80")
CACHES: tuple[Any, ...] = ((F16, F16, None), (BF16, S8, None), (F16, U4, None), (BF16, S8, U4))
"""Types of queries, keys and values."""
SCORED = (*FORMS[1:], *SUNK)
"""Options of scores, each combination once."""


def decode_sources(arch: str) -> Iterator[KernelSource]:
    heads = ((F16, F16, 128, 4), (F16, S8, 128, 4), (BF16, BF16, 64, 1), (F32, F32, 8, 2), (F32, F32, 256, 1))
    for head in (*heads, (F16, F16, 256, 8)):
        yield AttentionDecode.for_shape(*head, arch).emit()
    for form in SCORED:
        for x, cache, head in ((F32, F32, 64), (F32, S8, 128)):
            yield AttentionDecode.for_shape(x, cache, head, 2, arch, form).emit()


def mma_attention(arch: str) -> list[AttentionMma]:
    heads = ((F16, F16, 16, 1), (BF16, BF16, 64, 3), (F16, F16, 80, 8), (F16, F16, 128, 4), (BF16, BF16, 256, 8))
    heads += ((BF16, S8, 64, 1), (F16, S8, 128, 4), (F16, S8, 256, 12))
    clusters = (1, 2, 4, 8, 1, 8, 4, 2) if arch == ARCH else (1,) * len(heads)
    found = [AttentionMma.for_shape(*head, arch, n) for head, n in zip(heads, clusters, strict=True)]
    few_bits = ((F16, U4, 128, 4, None), (BF16, U4, 64, 3, None), (BF16, S8, 128, 8, U4), (F16, U4, 32, 1, None))
    found += [AttentionMma.for_shape(x, keys, head, n, arch, values=v) for x, keys, head, n, v in few_bits]
    short = AttentionMma.for_shape(F16, S8, 128, 4, arch).shortened(64)
    return [*found, AttentionMma.for_shape(BF16, U4, 256, 8, arch), short]


def scored(arch: str) -> Iterator[AttentionMma]:
    for form in SCORED:
        for x, cache, head, queries in ((F16, F16, 128, 4), (BF16, S8, 128, 8), (F16, U4, 64, 2), (F16, F16, 256, 2)):
            yield AttentionMma.for_shape(x, cache, head, queries, arch, scores=form)
        if arch == ARCH:
            yield AttentionMma.for_shape(F16, F16, 128, 4, arch, 8, scores=form)


def mma_sources(arch: str) -> Iterator[KernelSource]:
    yield from (desc.emit() for desc in (*mma_attention(arch), *scored(arch)))


def append_sources(arch: str) -> Iterator[KernelSource]:
    """With and without rotary positions, and with norms of heads as Qwen 3 and Gemma 3 have them."""
    for i, desc in enumerate(mma_attention(arch)):
        yield AttentionAppend(desc, i % 4 != 3).emit()
    for desc in scored(arch):
        yield AttentionAppend(desc, True).emit()
    for form in (SUNK[0], SUNK[4]):  # heads of GPT-OSS
        for cluster in (1, 8) if arch == ARCH else (1,):
            kernel = AttentionMma.for_shape(BF16, BF16, 64, 8, arch, cluster, None, form)
            yield AttentionAppend(kernel, True, settled=True).emit()
            yield AttentionAppend(kernel, False, True).emit()
    for form in (PLAIN, Scores(windowed=True)):
        for (x, keys, values), (head, queries) in ((c, h) for c in CACHES for h in ((128, 4), (128, 8), (256, 4))):
            cluster = 8 if arch == ARCH and queries == 4 and head == 128 else 1
            kernel = AttentionMma.for_shape(x, keys, head, queries, arch, cluster, values, form)
            yield AttentionAppend(kernel, True, True).emit()


ROTATED = (
    (F16, F16, 128, 4, 128, 1),
    (BF16, BF16, 64, 8, 128, 2),
    (BF16, BF16, 64, 1, 64, 1),
    (F16, S8, 128, 2, 32, 1),
)
"""Types, columns and queries of a head of keys, columns of a group and passes of a rotation."""


def rotated_sources(arch: str) -> Iterator[KernelSource]:
    for x, keys, head, queries, group, passes in ROTATED:
        rotation = RowsRotation(x, group, passes)
        for form, cluster in ((PLAIN, 8 if arch == ARCH else 1), (SUNK[1], 1)):
            kernel = AttentionMma.for_shape(x, keys, head, queries, arch, cluster, None, form)
            step = AttentionAppend(kernel, True, settled=True, rotation=rotation)
            yield step.emit()
            yield AttentionAppendTokens(step, 4).emit()


def append_tokens_sources(arch: str) -> Iterator[KernelSource]:
    """One and several tokens in a CTA, all of a sequence's and not, of each kind of cache, with norms and options."""
    clustered = arch == ARCH
    for rows, desc in zip((2, 8, 3, 4, 4, 8, 4, 2, 4, 2, 4, 8, 4, 2), mma_attention(arch), strict=True):
        step = AttentionAppend(desc, rows != 3, settled=rows == 2)
        yield AttentionAppendTokens(step, rows).emit()
    for form in (Scores(windowed=True), Scores(True, True), Scores(True, ring=True), *SUNK[3:5]):
        for (x, keys, values), (head, queries) in zip(CACHES, ((128, 4), (64, 8), (128, 2), (256, 2)), strict=True):
            cluster = 8 if clustered and head <= 128 and queries != 2 else 1
            kernel = AttentionMma.for_shape(x, keys, head, queries, arch, cluster, values, form)
            yield AttentionAppendTokens(AttentionAppend(kernel, True, form.capped, form.ring), 4).emit()
    wide = AttentionMma.for_shape(F16, F16, 256, 2, arch, scores=Scores(True, True))  # heads of Gemma 2
    yield AttentionAppendTokens(AttentionAppend(wide, True), 4).emit()


def tokens_spill(source: KernelSource) -> int:
    """Two words: float16 heads of 256 with a window and a softcap."""
    return 8 if "f16_f16_h256" in source.name and "_win_cap" in source.name else 0


def mma_instructions(source: KernelSource) -> Iterator[str]:
    """Clusters store to the shared memory of other CTAs."""
    yield from (r"HMMA\.16816\.F32", "MOVM", "STAS" if "__cluster_dims__" in source.text else "!STAS")
    if "_u4_" not in source.name:
        yield r"LDG\.E.*128"


def wgmma_prompts() -> list[PromptWgmma]:
    heads = ((F16, F16, 64), (BF16, BF16, 80), (F16, F16, 128), (F16, S8, 128), (BF16, S8, 96), (F16, F16, 256))
    heads += ((BF16, S8, 256), (F16, F16, 192), (F16, S8, 160))
    found = [PromptWgmma.for_shape(*head, ARCH) for head in heads]
    shared = (((BF16, BF16, 80), 2), ((F16, S8, 128), 8), ((F16, F16, 256), 1))
    found += [PromptWgmma.for_shape(*head, ARCH, 1, parts) for head, parts in shared]
    few_bits = ((F16, U4, 128, None), (BF16, U4, 64, None), (F16, S8, 128, U4), (BF16, U4, 256, None))
    found += [PromptWgmma.for_shape(x, keys, head, ARCH, values=v) for x, keys, head, v in few_bits]
    return [*found, PromptWgmma.for_shape(F16, U4, 128, ARCH, 1, 4)]


def mma_prompts(arch: str) -> list[PromptMma]:
    heads = ((F16, F16, 8), (BF16, S8, 16), (F16, F16, 80), (F16, F16, 128), (BF16, S8, 128), (F16, F16, 256))
    found = [PromptMma.for_shape(*head, arch) for head in (*heads, (F16, S8, 256))]
    few_bits = ((F16, U4, 128, None), (BF16, S8, 64, U4), (BF16, U4, 256, None))
    return [*found, *(PromptMma.for_shape(x, keys, head, arch, values=v) for x, keys, head, v in few_bits)]


SCORED_HEADS: Any = ((F16, F16, 128), (BF16, S8, 128), (F16, U4, 64), (F16, F16, 256), (BF16, S8, 256))


def prompt_mma_sources(arch: str) -> Iterator[KernelSource]:
    yield from (desc.emit() for desc in mma_prompts(arch))
    for form in SCORED:
        for head in SCORED_HEADS:
            yield replace(PromptMma.for_shape(*head, arch), scores=form).emit()


def prompt_wgmma_sources(arch: str) -> Iterator[KernelSource]:
    if arch == ARCH:
        yield from (desc.emit() for desc in wgmma_prompts())
        for form in SCORED:
            for head in SCORED_HEADS:
                yield replace(PromptWgmma.for_shape(*head, arch), scores=form).emit()
        for form in (SUNK[0], SUNK[4]):
            for parts in (1, 4):
                yield PromptWgmma.for_shape(BF16, BF16, 64, arch, 1, parts, scores=form).emit()


def spilt(source: KernelSource) -> int:
    """Two words: heads of 256 over an int8 cache with a window and a softcap, of Gemma 2; softcaps with sinks."""
    both = "_win_cap" in source.name
    return 8 if ("s8_h256" in source.name and both) or ("_cap" in source.name and "_sink" in source.name) else 0


DECODE_REFUSALS: dict[str, list[Any]] = {
    "x": [{"x": S8}],
    "cache": [{"cache": F32}],
    "head": [{"head": 100}],
    "group": [{"group": 3}],
    "warps": [{"warps": 17}],
    "unroll": [{"unroll": 9}],
    "registers": [{"group": 8, "unroll": 8}],
    "shared_memory": [{"group": 8, "warps": 10, "unroll": 1, "head": 256}],
}
MMA_REFUSALS: dict[str, list[Any]] = {
    "x": [{"x": F32}],
    "cache": [{"cache": BF16}],
    "head": [{"head": 100}],
    "group": [{"group": 9}],
    "warps": [{"warps": 9}],
    "tiles": [{"tiles": 5}],
    "cluster": [{"cluster": 3}],
    "clusters": [{"arch": "sm_80"}],
    "registers": [{"tiles": 3}],
    "shared_memory": [{"group": 8, "warps": 8, "tiles": 1, "head": 240}],
}
PROMPT_WGMMA_REFUSALS: dict[str, list[Any]] = {
    "arch": [{"arch": "sm_80"}],
    "x": [{"x": F32, "cache": F32}],
    "cache": [{"cache": BF16}],
    "head": [{"head": 72, "cache": S8}],
    "groups": [{"groups": 3}],
    "keys": [{"keys": 96}],
    "parts": [{"groups": 1, "parts": 16}],
    "one_group": [{"parts": 2}],
    "registers": [{"head": 256}],
    "shared_memory": [{"head": 144, "cache": S8, "groups": 1}],
}
PROMPT_MMA_REFUSALS: dict[str, list[Any]] = {
    "x": [{"x": F32, "cache": F32}],
    "cache": [{"cache": BF16}],
    "head": [{"head": 264}],
    "keys": [{"keys": 128}],
    "shared_memory": [{"head": 256, "arch": "sm_86"}],
}

ROWS = {
    "attention_decode": Row(AttentionDecode.emit, decode_sources, simt.CONSTRAINTS, DECODE_REFUSALS, legal=DECODE),
    "attention_mma": Row(
        AttentionMma.emit, mma_sources, mma.CONSTRAINTS, MMA_REFUSALS, legal=MMA, instructions=mma_instructions
    ),
    "attention_append": Row(
        AttentionAppend.emit,
        append_sources,
        scores.CONSTRAINTS,
        {"ring": [{"ring": True}]},
        legal=PLAIN,
        instructions=mma_instructions,
    ),
    "attention_append_rotated": Row(
        AttentionAppend.emit,
        rotated_sources,
        append.CONSTRAINTS,
        {
            "rotation": [
                {"rotation": RowsRotation(S8, 128)},
                {"rotation": RowsRotation(BF16, 128)},
                {"rotation": RowsRotation(F16, 256)},
                {"attention": AttentionMma(F16, F16, 64, 1, ARCH)},
                {"attention": AttentionMma(F16, S8, 128, 4, ARCH, values=U4)},
            ]
        },
        legal=AttentionAppend(MMA, True, rotation=RowsRotation(F16, 128)),
        instructions=lambda source: (*mma_instructions(source), r"SHFL\.BFLY"),
    ),
    "attention_append_tokens": Row(
        AttentionAppendTokens.emit,
        append_tokens_sources,
        append_tokens.CONSTRAINTS,
        {
            "rows": [{"rows": 1}, {"rows": 9}],
            "shared_memory": [
                {"rows": 8, "step": AttentionAppend(AttentionMma(F16, F16, 256, 8, ARCH, tiles=1), True)}
            ],
        },
        legal=AttentionAppendTokens(AttentionAppend(MMA, True), 4),
        instructions=mma_instructions,
        spill=tokens_spill,
    ),
    "prompt_mma": Row(
        PromptMma.emit,
        prompt_mma_sources,
        prompt_mma.CONSTRAINTS,
        PROMPT_MMA_REFUSALS,
        legal=PROMPT_MMA,
        instructions=lambda source: (r"HMMA\.16816\.F32", "LDSM", "LDGSTS"),
        spill=spilt,
    ),
    "prompt_wgmma": Row(
        PromptWgmma.emit,
        prompt_wgmma_sources,
        prompt_wgmma.CONSTRAINTS,
        PROMPT_WGMMA_REFUSALS,
        legal=PROMPT_WGMMA,
        instructions=lambda source: (r"HGMMA\.64x\d+x16\.F32", "LDGSTS", r"ARRIVES\.LDGSTSBAR", r"FENCE\.VIEW\.ASYNC"),
        spill=spilt,
    ),
}
