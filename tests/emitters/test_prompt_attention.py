"""Kernels of prompt attention as text and as binaries: names, refusals, registers, instructions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from qcut.dispatch.attention import (
    PromptKernel,
    emit_prompt_attention,
    prompt_attention_menu,
    select_prompt_attention,
)
from qcut.dispatch.gpus import Target
from qcut.emitters.attention import prompt_mma, prompt_wgmma
from qcut.emitters.attention.prompt import tiles
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.prompt_wgmma import PromptWgmma
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType, EmitError, KernelSource
from tests.support.compiled import build
from tests.support.sass import instructions, listing

F16, BF16, F32, S8, U4 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.U4
H200, A100 = Target("sm_90a", 132), Target("sm_80", 108)
WGMMA = PromptWgmma(F16, F16, 128, "sm_90a")
MMA = PromptMma(F16, F16, 128, "sm_80")


def wgmma_kernels() -> list[PromptWgmma]:
    heads = ((F16, F16, 64), (BF16, BF16, 80), (F16, F16, 128), (F16, S8, 128), (BF16, S8, 96), (F16, F16, 256))
    heads += ((BF16, S8, 256), (F16, F16, 192), (F16, S8, 160))
    found = [PromptWgmma.for_shape(*head, "sm_90a") for head in heads]
    shared = (((BF16, BF16, 80), 2), ((F16, S8, 128), 8), ((F16, F16, 256), 1))
    found += [PromptWgmma.for_shape(*head, "sm_90a", 1, parts) for head, parts in shared]
    few_bits = ((F16, U4, 128, None), (BF16, U4, 64, None), (F16, S8, 128, U4), (BF16, U4, 256, None))
    found += [PromptWgmma.for_shape(x, keys, head, "sm_90a", values=v) for x, keys, head, v in few_bits]
    return [*found, PromptWgmma.for_shape(F16, U4, 128, "sm_90a", 1, 4)]


def mma_kernels(arch: str) -> list[PromptMma]:
    heads = ((F16, F16, 8), (BF16, S8, 16), (F16, F16, 80), (F16, F16, 128), (BF16, S8, 128), (F16, F16, 256))
    found = [PromptMma.for_shape(*head, arch) for head in (*heads, (F16, S8, 256))]
    few_bits = ((F16, U4, 128, None), (BF16, S8, 64, U4), (BF16, U4, 256, None))
    return [*found, *(PromptMma.for_shape(x, keys, head, arch, values=v) for x, keys, head, v in few_bits)]


def sources(*kernels: PromptKernel) -> list[KernelSource]:
    return [emit_prompt_attention(kernel) for kernel in kernels]


def test_text_is_deterministic_and_names_are_unique() -> None:
    found = sources(*wgmma_kernels(), *mma_kernels("sm_80"), *mma_kernels("sm_90a"))
    assert found == sources(*wgmma_kernels(), *mma_kernels("sm_80"), *mma_kernels("sm_90a"))
    assert len({source.name for source in found}) == len({source.text for source in found}) == len(found)


def test_names_spell_the_kernel() -> None:
    assert WGMMA.name == "qcut_prompt_wgmma_sm90a_f16_f16_h128_128x128"
    assert replace(WGMMA, groups=1, parts=4).name == "qcut_prompt_wgmma_sm90a_f16_f16_h128_64x128_c4"
    assert replace(WGMMA, x=BF16, cache=S8, head=96, groups=1).name == "qcut_prompt_wgmma_sm90a_bf16_s8_h96_64x128"
    assert MMA.name == "qcut_prompt_mma_sm80_f16_f16_h128_64x64"
    assert replace(MMA, cache=S8, keys=32).name == "qcut_prompt_mma_sm80_f16_s8_h128_64x32"


def test_both_forms_take_the_same_arguments() -> None:
    for cache in (F16, S8):
        wgmma, mma = replace(WGMMA, cache=cache), replace(MMA, cache=cache)
        assert wgmma.params() == mma.params()
        for source in sources(wgmma, mma):
            assert source.params == wgmma.params()
            assert source.waits
            assert ("key_scales, value_scales, starts" in source.text) == (cache is S8)


REFUSALS: dict[str, dict[str, Any]] = {
    "arch": {"arch": "sm_80"},
    "x": {"x": F32, "cache": F32},
    "cache": {"cache": BF16},
    "head": {"head": 72, "cache": S8},
    "groups": {"groups": 3},
    "keys": {"keys": 96},
    "parts": {"groups": 1, "parts": 16},
    "one_group": {"parts": 2},
    "registers": {"head": 256},
    "shared_memory": {"head": 144, "cache": S8, "groups": 1},
}
MMA_REFUSALS: dict[str, dict[str, Any]] = {
    "x": {"x": F32, "cache": F32},
    "cache": {"cache": S8, "x": F32},
    "head": {"head": 264},
    "keys": {"keys": 128},
    "shared_memory": {"head": 256, "arch": "sm_86"},
}


def test_every_constraint_is_refused_below() -> None:
    assert [c.name for c in prompt_wgmma.CONSTRAINTS] == list(REFUSALS)
    assert [c.name for c in prompt_mma.CONSTRAINTS] == list(MMA_REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_kernels_are_refused(name: str) -> None:
    with pytest.raises(EmitError, match=f": {name}: "):
        replace(WGMMA, **REFUSALS[name])


@pytest.mark.parametrize("name", MMA_REFUSALS)
def test_illegal_kernels_of_every_architecture_are_refused(name: str) -> None:
    changes = MMA_REFUSALS[name]
    with pytest.raises(EmitError, match=": x: " if name == "cache" else f": {name}: "):
        replace(MMA, **changes)


# ── choice ───────────────────────────────────────────────────────────────────────────────────────


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


def test_short_prompts_take_small_tiles_and_clusters_share_very_few() -> None:
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


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


def test_products_of_warpgroups_neither_spill_nor_wait_for_each_other() -> None:
    kernels = wgmma_kernels()
    for kernel, binary in zip(kernels, build(*sources(*kernels)), strict=True):
        resources = binary.resources
        assert resources is not None
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, kernel.name
        assert resources.registers <= (255 if kernel.groups == 1 else 168)
        assert "serialized" not in binary.log, kernel.name
        found = listing(binary.cubin)
        steps = -(-kernel.head // 16) * 16
        scores = [name for name in found if name.startswith(f"HGMMA.64x{kernel.keys}x16.F32")]
        assert len(scores) >= steps // 16, kernel.name
        assert any(name.startswith("LDGSTS") for name in found)
        assert any(name.startswith("ARRIVES.LDGSTSBAR") for name in found)
        assert any(name.startswith("FENCE.VIEW.ASYNC") for name in found)


def test_softmax_runs_beside_the_products_of_values() -> None:
    """Between the wait for scores and that for weighted values lie a block's exponentials."""
    [binary] = build(emit_prompt_attention(WGMMA))
    found = listing(binary.cubin)
    text = " ".join(name for name in found if name.startswith(("HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2")))
    both = r"(?:HGMMA\S* ){16}WARPGROUP\S* ((?:MUFU\S* )+)WARPGROUP"
    between = re.search(both, text)
    assert between is not None
    assert between[1].count("MUFU") >= WGMMA.keys // 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_every_architecture_multiplies_on_tensor_cores(arch: str) -> None:
    kernels = mma_kernels(arch)[:: 1 if arch == "sm_80" else 3]
    for kernel, binary in zip(kernels, build(*sources(*kernels)), strict=True):
        resources = binary.resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0, kernel.name
        found = instructions(binary.cubin)
        assert any(name.startswith("HMMA.16816.F32") for name in found), kernel.name
        assert any(name.startswith("LDSM") for name in found)
        assert any(name.startswith("LDGSTS") for name in found)
