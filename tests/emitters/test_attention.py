"""Attention of steps and of prompts: which kernel serves which heads, parts, grids, order of instructions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from qcut.dispatch.attention import prompt_attention_menu, select_attention, select_prompt_attention
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.attention import cycles
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.prompt import tiles
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.prompt_wgmma import PromptWgmma
from qcut.emitters.attention.scores import FORMS, SUNK
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType
from tests.emitters.conformance.attention import BF16, DECODE, F16, F32, MMA, PROMPT_MMA, PROMPT_WGMMA, S8, U4
from tests.support.binaries import build, listing

H200, A100 = Target("sm_90a", 132), Target("sm_80", 108)


@pytest.mark.parametrize("head", [8, 32, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("x", [F16, F32])
def test_every_decoders_heads_have_a_kernel(head: int, queries: int, x: DType) -> None:
    for cache in (x, *([S8] if head % 16 == 0 else [])):
        desc = AttentionDecode.for_shape(x, cache, head, queries, "sm_90a")
        assert desc.grid(3, 2, queries, 5) == (5, 2 * -(-queries // desc.group), 3)


def test_parts_fill_the_gpu_and_leave_each_enough() -> None:
    for batch, kv_heads, context in ((1, 8, 8192), (8, 8, 8192), (1, 20, 512), (64, 8, 512), (1, 1, 32), (1, 1, 10**6)):
        parts = DECODE.parts(batch, kv_heads, 4, context, 132)
        assert 1 <= parts <= 64
        assert parts == 1 or context / parts >= 2 * DECODE.step
        assert parts == 1 or (parts - 1) * batch * kv_heads < 2 * 132
    assert DECODE.parts(1, 8, 4, 8192, 132) * 8 >= 2 * 132
    assert DECODE.workspace_floats(2, 8, 4, 1) == 0
    assert DECODE.workspace_floats(2, 8, 4, 3) == 2 * 8 * 3 * 4 * 130


@pytest.mark.parametrize("head", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 3, 8, 12, 17])
def test_halves_attend_on_tensor_cores(head: int, queries: int) -> None:
    for x, cache in ((F16, F16), (BF16, BF16), (BF16, S8)):
        desc = AttentionMma.for_shape(x, cache, head, queries, "sm_80")
        assert desc.grid(3, 2, queries, 5) == (5, 2 * -(-queries // 8), 3)
        sizes = {"batch": 3, "kv_heads": 2, "context": 700}
        chosen, parts = select_attention(x, cache, head, queries, Target("sm_80", 108), **sizes)
        assert (chosen, 1 <= parts <= 21) == (desc.shortened(-(-700 // parts)), True)
    for x, head in ((F32, 128), (F16, 8)):
        assert isinstance(select_attention(x, x, head, queries, Target("sm_90a", 108), **sizes)[0], AttentionDecode)


@pytest.mark.parametrize("cache", [F16, S8, U4])
def test_short_contexts_have_no_tiles_that_do_nothing(cache: DType) -> None:
    most = AttentionMma.for_shape(F16, cache, 128, 4, "sm_90a").tiles
    for context in (1, 63, 64, 65, 129, 200, 513, 1024, 4096, 1 << 17):
        sizes = {"batch": 1, "kv_heads": 8, "context": context}
        desc, parts = select_attention(F16, cache, 128, 4, H200, **sizes)
        assert isinstance(desc, AttentionMma)
        held = desc.tiles * desc.warps * 16 * parts
        assert desc.tiles == most or held >= context > held - desc.warps * 16 * parts
        closed, same = select_attention(F16, cache, 128, 4, replace(H200, ahead_of_time=True), **sizes)
        assert (closed, same) == (replace(desc, tiles=most), parts)
    assert desc.tiles == most > 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_masks_alone_unpack_codes(arch: str) -> None:
    """Half of what a subtraction for each pair of codes would take: 256 of them for a lane's 16 keys and values."""
    packed = AttentionMma(F16, U4, 128, 4, arch, tiles=1)
    for binary in build(packed.emit(), replace(packed, x=BF16).emit()):
        found = [name for name in listing(binary.cubin) if name.startswith(("HADD2", "HFMA2", "HMUL2"))]
        assert sum(".F32" not in name for name in found) < 16, found


def test_short_contexts_append_with_half_the_code() -> None:
    """Code that runs once has to be fetched: a step over a few tokens takes as long as that."""
    long = AttentionMma.for_shape(F16, S8, 128, 4, "sm_90a")
    texts = [AttentionAppend(desc, True).emit() for desc in (long, long.shortened(64))]
    whole, short = (len(listing(binary.cubin)) for binary in build(*texts))
    assert short < 0.7 * whole
    read = build(long.emit())[0]
    assert whole < 1.22 * len(listing(read.cubin))  # what turns, rounds and stores a new row stands there once


def test_parts_of_short_contexts_meet_in_clusters() -> None:
    def chosen(batch: int, kv_heads: int, context: int, arch: str = "sm_90a") -> tuple[int, int]:
        sizes = {"batch": batch, "kv_heads": kv_heads, "context": context}
        desc, parts = select_attention(F16, F16, 128, 4, Target(arch, 132), **sizes)
        assert isinstance(desc, AttentionMma)
        assert desc.cluster in (1, parts)
        return desc.cluster, parts

    assert chosen(1, 8, 48) == (1, 1)
    assert chosen(1, 8, 513) == chosen(1, 8, 2049) == (8, 8)
    assert chosen(8, 8, 8193) == (1, 4)  # 256 CTAs, where 264 have a place, but only 240 in clusters of four
    assert chosen(1, 8, 32768) == (1, 33)
    assert chosen(64, 8, 4097) == (1, 1)
    assert chosen(1, 8, 4097, "sm_80")[0] == 1


def test_estimates_follow_the_bytes() -> None:
    alone = replace(MMA, cluster=1)
    short, long, longer = (cycles(alone, 1, 64, context, H200) for context in (32, 512, 2048))
    assert longer == pytest.approx(4 * long, rel=0.1)
    assert long / 12 < short < long / 4  # what it waits for at first
    four = replace(MMA, cluster=4)
    assert cycles(alone, 4, 60, 8192, H200) > cycles(four, 4, 60, 8192, H200)
    assert cycles(alone, 4, 64, 8192, H200) < cycles(four, 4, 64, 8192, H200)  # four clusters wait
    assert replace(MMA, cluster=4).workspace_floats(2, 8, 4, 4) == alone.workspace_floats(2, 8, 4, 1) == 0
    assert alone.workspace_floats(2, 8, 4, 3) == 2 * 8 * 3 * 4 * 132


@pytest.mark.parametrize("x", [F16, BF16])
@pytest.mark.parametrize("gpu", [H200, A100, Target("sm_86", 84), Target("sm_120", 188)], ids=lambda gpu: gpu.arch)
def test_every_head_of_whole_vectors_has_a_kernel(x: DType, gpu: Target) -> None:
    for cache, step in ((x, 8), (S8, 16)):
        for head in range(step, 257, step):
            for length in (1, 4096):
                shape = {"sequences": 2, "length": length, "kv_heads": 8, "group": 4, "context": 4096}
                kernel = select_prompt_attention(x, cache, head, gpu, **shape)
                assert isinstance(kernel, PromptWgmma if gpu is H200 else PromptMma), head
                assert kernel.smem_bytes <= architecture(gpu.arch).smem_bytes


@pytest.mark.parametrize(("x", "cache", "head"), [(F32, F32, 64), (F16, F16, 20), (F16, S8, 40), (F16, F16, 264)])
def test_other_types_and_heads_have_none(x: DType, cache: DType, head: int) -> None:
    for gpu in (H200, A100):
        shape = {"sequences": 1, "length": 64, "kv_heads": 8, "group": 4, "context": 4096}
        assert select_prompt_attention(x, cache, head, gpu, **shape) is None


def test_short_prompts_take_small_tiles_and_clusters() -> None:
    def sizes(length: int, context: int = 4096) -> tuple[int, int]:
        shape = {"sequences": 1, "length": length, "kv_heads": 8, "group": 4, "context": context}
        kernel = select_prompt_attention(F16, F16, 128, H200, **shape)
        assert isinstance(kernel, PromptWgmma)
        return kernel.rows, kernel.parts

    assert [sizes(length) for length in (1, 64, 256, 4096)] == [(64, 8), (64, 2), (64, 1), (128, 1)]
    assert [sizes(1, context) for context in (100, 511, 512, 1024)] == [(64, 1), (64, 1), (64, 2), (64, 4)]


def test_the_menu_has_every_kernel_that_is_chosen() -> None:
    for gpu, count in ((H200, 5), (A100, 1)):
        menu = prompt_attention_menu(F16, S8, 80, gpu.arch)
        assert len(menu) == count
        chosen = {
            select_prompt_attention(F16, S8, 80, gpu, sequences=n, length=length, kv_heads=8, group=4, context=context)
            for n in (1, 3)
            for length in (1, 50, 64, 129, 300, 5000)
            for context in (64, 600, 1100, 10_000)
        }
        assert chosen == set(menu)
    assert prompt_attention_menu(F32, F32, 64, "sm_90a") == ()


def test_tiles_hold_every_row() -> None:
    for rows, length, group in ((128, 1, 4), (128, 32, 4), (128, 33, 4), (64, 129, 7)):
        count = tiles(rows, 3, length, 2, group)
        assert count % 6 == 0
        assert (count // 6 - 1) * rows < length * group <= count // 6 * rows


def test_softmax_runs_beside_the_products_of_values() -> None:
    """Between the wait for scores and that for weighted values lie a block's exponentials."""
    [binary] = build(PROMPT_WGMMA.emit())
    found = listing(binary.cubin)
    text = " ".join(name for name in found if name.startswith(("HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2")))
    both = r"(?:HGMMA\S* ){16}WARPGROUP\S* ((?:MUFU\S* )+)WARPGROUP"
    between = re.search(both, text)
    assert between is not None
    assert between[1].count("MUFU") >= PROMPT_WGMMA.keys // 2


def test_forms_of_attention_take_the_same_arguments() -> None:
    for cache in (F16, S8):
        assert replace(PROMPT_WGMMA, cache=cache).params() == replace(PROMPT_MMA, cache=cache).params()
    for form in (*FORMS, *SUNK):
        for desc in (MMA, DECODE, PROMPT_MMA, PROMPT_WGMMA):
            assert replace(desc, scores=form).params() == (*desc.params(), *form.params())
