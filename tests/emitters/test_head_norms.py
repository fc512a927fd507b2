"""Norms of heads in a step's attention kernel: names, arguments, and binaries without spills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qcut.emitters.attention.append import AttentionAppend, emit_attention_append
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.scores import FORMS, PLAIN, Scores
from qcut.emitters.core.source import DType
from tests.support.compiled import build

F16, BF16, S8, U4 = DType.F16, DType.BF16, DType.S8, DType.U4
CACHES: tuple[Any, ...] = ((F16, F16, None), (BF16, S8, None), (F16, U4, None), (BF16, S8, U4))
"""Types of queries, keys and values."""


def steps(arch: str, scores: Scores) -> Iterator[AttentionAppend]:
    """Heads of Qwen 3 and Gemma 3, a number of queries of each."""
    for (x, keys, values), (head, queries) in ((c, h) for c in CACHES for h in ((128, 4), (128, 8), (256, 4))):
        cluster = 8 if arch == "sm_90a" and queries == 4 and head == 128 else 1
        kernel = AttentionMma.for_shape(x, keys, head, queries, arch, cluster, values, scores)
        yield AttentionAppend(kernel, True, True)


@pytest.mark.parametrize("scores", FORMS, ids=str)
def test_names_and_arguments_end_with_them(scores: Scores) -> None:
    for step in steps("sm_90a", scores):
        source, plain = emit_attention_append(step), emit_attention_append(replace(step, norms=False))
        names = [param.name for param in source.params]
        assert names == [*(param.name for param in plain.params), "query_norm", "key_norm", "eps"]
        assert source.name == plain.name + "_norm"
        assert source.text != plain.text


@pytest.mark.parametrize("scores", [PLAIN, Scores(windowed=True)], ids=["plain", "windowed"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_do_not_spill(arch: str, scores: Scores) -> None:
    found = [emit_attention_append(step) for step in steps(arch, scores)]
    for source, binary in zip(found, build(*found), strict=True):
        assert binary.resources is not None
        assert binary.resources.spill_load_bytes == binary.resources.spill_store_bytes == 0, source.name
        assert binary.resources.stack_bytes == 0, source.name  # a choice between two norms' weights takes none
        assert binary.resources.smem_bytes <= 49_152, source.name
