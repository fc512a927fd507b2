"""Prompts on the GPU: captured chunks against launched ones, pieces against wholes, and what graphs leave behind."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from qcut.backends.cuda.launch.plans import forget_plans
from qcut.engine import graphs
from qcut.engine.engine import Engine
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import VOCABULARY, prompts_of

LENGTHS = ((1, 1), (20, 3), (7,), (70, 64))


@pytest.mark.parametrize("kv_cache", ["auto", "int8", "int4"])
@pytest.mark.parametrize("scheme", [None, "w8a8", "codebook4_int8"])
def test_captured_prompts_are_the_launched_ones(scheme: str | None, kv_cache: Any) -> None:
    model = llama(scheme)
    launched, captured = (Engine(model, batch=2, kv_cache=kv_cache, graphs=graphs) for graphs in (False, True))
    for _ in range(2):  # captured, then replayed
        for lengths in LENGTHS:
            prompts = prompts_of(VOCABULARY, *lengths)
            assert_same(captured.prefill(prompts), launched.prefill(prompts))
            assert_same(captured.decode(range(len(lengths))), launched.decode(range(len(lengths))))
            more = prompts_of(VOCABULARY, *(length + 3 for length in lengths))
            assert_same(captured.prefill(more, reuse_prefix=True), launched.prefill(more, reuse_prefix=True))
    again = captured.prefill(prompts_of(VOCABULARY, *LENGTHS[1]))
    captured.prefill(prompts_of(VOCABULARY, *LENGTHS[2]))
    assert_same(again, launched.prefill(prompts_of(VOCABULARY, *LENGTHS[1])))  # no view of what a graph writes


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("rows", [1, 24, 64])
def test_float32_chunks_are_the_cpus_one_chunk(kv_cache: Any, rows: int) -> None:
    cpu = llama(None, torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, 7, 100, 1)
    want = Engine(cpu, batch=3, kv_cache=kv_cache).generate(prompts, 20)
    engine = Engine(copy.deepcopy(cpu).to(DEVICE), batch=3, kv_cache=kv_cache)
    engine.runner.max_prefill_tokens = 3 * rows
    assert engine.generate(prompts, 20) == want
    heads, tails = [p[: len(p) // 2] for p in prompts[:2]], [p[len(p) // 2 :] for p in prompts[:2]]
    engine.prefill(heads)
    assert engine.generate(tails, 20, reuse_prefix=True) == want[:2]


@pytest.mark.parametrize(("kv_cache", "db"), [("auto", 40), ("int8", 25)])  # int8 keys may be a step off
def test_half_precision_chunks_are_near_one_chunk(kv_cache: Any, db: float) -> None:
    model, (prompt,) = llama(), prompts_of(VOCABULARY, 250)
    engine = Engine(model, kv_cache=kv_cache)
    want = engine.prefill([prompt])
    for pieces in ((1, 249), (249, 1), (64, 100, 86), (3,) * 83 + (1,)):
        first, kept = 0, False
        for count in pieces:
            got = engine.prefill([prompt[first : first + count]], reuse_prefix=kept)
            first, kept = first + count, True
        assert sqnr_db(want, got) > db


def test_graphs_are_captured_anew_for_new_kernels() -> None:
    engine, prompts = Engine(llama("w8a8"), batch=2), prompts_of(VOCABULARY, 20, 3)
    want = engine.generate(prompts, 5)
    first = engine.runner.graphs
    assert first is not None
    assert first.count == 2
    forget_plans()
    assert first.count == 2
    engine.prefill(prompts)
    assert first.count == 1
    assert engine.generate(prompts, 5) == want


def test_prompts_of_every_length_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 4)
    engine = Engine(llama(), batch=2)

    def memory() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    engine.prefill(prompts_of(VOCABULARY, 300, 300))
    before = memory()
    for length in range(10, 300, 29):
        engine.prefill(prompts_of(VOCABULARY, length, 1))
        engine.prefill(prompts_of(VOCABULARY, length))
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.count == 4
    assert memory() <= before + (8 << 20)
