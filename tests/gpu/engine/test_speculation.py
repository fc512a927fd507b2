"""Speculative decoding on the GPU: the tokens of plain steps, with graphs and launches, drafts of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import qcut
from qcut.engine.engine import Engine
from qcut.engine.scheduler import Scheduler
from qcut.engine.speculation import DraftedLoop
from qcut.numerics.sampling import Sampling
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE
from tests.support.decoders import VOCABULARY, prompts_of, small

REPEATED = [[1, 2, 3, 4, 5, 6] * 3, [7, 8, 9] * 4 + [7], [5] * 6]


@pytest.fixture(autouse=True)
def _widest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of these tiny models take as long as their launches: the widest ones are taken."""
    monkeypatch.setattr(DraftedLoop, "cost", lambda loop, width, choose=None: 1.0)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_p=0.9, seed=5)], ids=["greedy", "sampled"])
def test_float32_tokens_are_those_of_plain_steps(graphs: bool, kv_cache: Any, sampling: Sampling | None) -> None:
    model = llama(None, torch.float32, "cuda")
    prompts = [*REPEATED, *prompts_of(VOCABULARY, 100)]
    want = Engine(model, batch=4, kv_cache=kv_cache).generate(prompts, 40, sampling=sampling, top=1)
    engine = Engine(model, batch=4, kv_cache=kv_cache, graphs=graphs, speculate=qcut.Lookup())
    found = engine.generate(prompts, 40, sampling=sampling, top=1)
    assert [one.tokens for one in found] == [one.tokens for one in want]
    assert [len(one.log_probabilities or ()) for one in found] == [40] * 4


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_families_give_the_cpus_tokens(kind: str) -> None:
    cpu = small(kind)
    want = Engine(cpu, batch=3).generate(REPEATED, 30)
    model = copy.deepcopy(cpu).to(DEVICE)
    assert Engine(model, batch=3, speculate=qcut.Lookup(drafts=3)).generate(REPEATED, 30) == want


def test_a_right_draft_model_leaves_few_steps() -> None:
    model = llama(None, torch.float32, "cuda")
    draft = Engine(copy.deepcopy(model), batch=2, context=256)
    plain = Engine(model, batch=3, context=256).generate(REPEATED, 40)
    engine = Engine(model, batch=3, context=256, speculate=qcut.DraftModel(draft, 3))
    assert engine.generate(REPEATED, 40) == plain
    with Scheduler(engine) as scheduler:
        requests = [scheduler.submit(prompt, 40) for prompt in REPEATED * 2]
        assert [request.result().tokens for request in requests] == [one.tokens for one in plain] * 2
        load = scheduler.load
    assert load.accepted_tokens >= max(20 * len(requests), load.drafted_tokens - 6 * len(requests))


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("w8a8", torch.float32), ("codebook4", torch.float16), ("codebook4_int8", torch.float16)],
)
def test_schedules_leave_most_tokens_as_they_are(scheme: str, dtype: torch.dtype) -> None:
    """Wider steps have other kernels: results may differ by a rounding, and by a step of int8 tokens after it."""
    model = llama(scheme, dtype, "cuda")
    want = [one.tokens for one in Engine(model, batch=3).generate(REPEATED, 24)]
    with Scheduler(Engine(model, batch=4, speculate=qcut.Lookup())) as scheduler:
        requests = [scheduler.submit(prompt, 24) for prompt in REPEATED * 3]
        found = [request.result().tokens for request in requests]
    same = sum(a == b for one, other in zip(found, want * 3, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.8 * 24 * len(found)
    assert scheduler.load.drafted_tokens > 0
