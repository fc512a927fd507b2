"""Windows, softcaps and rings of attention kernels: names, arguments, and binaries without spills.

One may spill two words: prompts of heads of 256 over an int8 cache with both, of Gemma 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qcut.dispatch.attention import emit_attention, emit_prompt_attention
from qcut.emitters.attention.append import AttentionAppend, emit_attention_append
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.prompt_wgmma import PromptWgmma
from qcut.emitters.attention.scores import FORMS, PLAIN, Scores
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.decoder.append import RotateAndAppend, emit_append
from tests.support.compiled import build, in_turns

F16, BF16, F32, S8, U4 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.U4


def steps(arch: str, scores: Scores) -> Iterator[AttentionMma | AttentionDecode]:
    for x, cache, head, queries in ((F16, F16, 128, 4), (BF16, S8, 128, 8), (F16, U4, 64, 2), (F16, F16, 256, 2)):
        yield AttentionMma.for_shape(x, cache, head, queries, arch, scores=scores)
    if arch == "sm_90a":
        yield AttentionMma.for_shape(F16, F16, 128, 4, arch, 8, scores=scores)
    for x, cache, head in ((F32, F32, 64), (F32, S8, 128)):
        yield AttentionDecode.for_shape(x, cache, head, 2, arch, scores)


def prompts(arch: str) -> Iterator[PromptMma | PromptWgmma]:
    heads: Any = ((F16, F16, 128), (BF16, S8, 128), (F16, U4, 64), (F16, F16, 256), (BF16, S8, 256))
    for head in heads:
        yield PromptMma.for_shape(*head, arch)
        if arch == "sm_90a":
            yield PromptWgmma.for_shape(*head, arch)


def sources(arch: str, scores: Scores) -> Iterator[KernelSource]:
    for step in steps(arch, scores):
        yield emit_attention(step)
        if isinstance(step, AttentionMma):
            yield emit_attention_append(AttentionAppend(step, True))
    for prompt in prompts(arch):
        yield emit_prompt_attention(replace(prompt, scores=scores))


def ring_sources(arch: str, scores: Scores) -> Iterator[KernelSource]:
    """Those of `sources`, and what appends prompts."""
    yield from sources(arch, scores)
    for x, cache, head, rotary, many in ((F16, F16, 128, "half", True), (BF16, S8, 256, "half", False)):
        yield emit_append(RotateAndAppend(x, cache, head, rotary, arch, many, ring=True))  # type: ignore[arg-type]
    yield emit_append(RotateAndAppend(F16, U4, 64, "none", arch, values=U4, ring=True))


@pytest.mark.parametrize("scores", FORMS, ids=str)
def test_names_and_arguments_end_with_them(scores: Scores) -> None:
    names = [param.name for param in scores.params()]
    assert names == ["window"] * scores.windowed + ["softcap"] * scores.capped + ["ring"] * scores.ring
    for source, plain in zip(sources("sm_90a", scores), sources("sm_90a", PLAIN), strict=True):
        assert source.params == (*plain.params, *scores.params())
        assert scores.suffix in source.name
        assert (source.text == plain.text) == (scores == PLAIN)


def test_a_ring_goes_with_a_window() -> None:
    with pytest.raises(EmitError, match="scores_ring: ring: goes with a window"):
        Scores(ring=True)
    assert all(scores.windowed for scores in FORMS if scores.ring)


@pytest.mark.parametrize("scores", FORMS[1:], ids=lambda scores: scores.suffix)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_do_not_spill(arch: str, scores: Scores) -> None:
    found = [*sources(arch, scores)]
    if scores.ring:
        found = in_turns(lambda each: [*ring_sources(each, scores)], arch)
    for source, binary in zip(found, build(*found), strict=True):
        both = scores.windowed and scores.capped
        spilt = 8 if "wgmma" in source.name and "s8_h256" in source.name and both else 0
        assert binary.resources is not None
        assert binary.resources.spill_load_bytes <= binary.resources.spill_store_bytes <= spilt, source.name
