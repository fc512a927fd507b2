"""Engines with rings in layers with windows, on the GPU: bitwise those that keep every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcut
from qcut.engine.engine import Engine
from qcut.engine.kv_cache.cache import KVDtype
from qcut.engine.scheduler import Scheduler
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import VOCABULARY, WIDE, prompts_of, small

CONTEXT = 600
HEADS: dict[str, dict[str, int]] = {
    "mistral_window": {},
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 64},
    "gpt_oss": {"head_dim": 64},
}


def engines(
    kind: str, kv_cache: KVDtype, batch: int, scheme: str | None = "w8a8", **options: Any
) -> tuple[Engine, Engine]:
    """One with rings and one without, over the same model, which read prompts in the same chunks."""
    model = small(kind, max_position_embeddings=CONTEXT, **WIDE, **HEADS[kind]).to(DEVICE, torch.float16)
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    options |= {
        "batch": batch,
        "kv_cache": kv_cache,
        "calibration_prompts": [[1, 2, 3, 4]] if kv_cache == "int4" else None,
    }
    rung, whole = (Engine(model, ring=ring, **options) for ring in (8, 0))
    assert rung.cache.nbytes < whole.cache.nbytes
    rung.runner.max_prefill_tokens = whole.runner.max_prefill_tokens = min(
        ring.room for ring in rung.runner.rings if ring is not None
    )
    return rung, whole


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kv_cache", ["auto", "int8", "int4"])
@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_those_without(kind: str, kv_cache: KVDtype, graphs: bool) -> None:
    rung, whole = engines(kind, kv_cache, 4, graphs=graphs)
    prompts = prompts_of(VOCABULARY, 5, 127, 129, 400)
    assert_same(rung.prefill(prompts), whole.prefill(prompts))
    for step in range(6):
        tokens = [(7 * step + i) % VOCABULARY for i in range(4)]
        assert_same(rung.decode(tokens), whole.decode(tokens))
    more = prompts_of(VOCABULARY, 30, 1, 4, 50)
    assert_same(rung.prefill(more, reuse_prefix=True), whole.prefill(more, reuse_prefix=True))
    assert_same(rung.decode([1, 2, 3, 4]), whole.decode([1, 2, 3, 4]))
    assert_same(rung.prefill(more[:1], reuse_prefix=[3]), whole.prefill(more[:1], reuse_prefix=[3]))


@pytest.mark.parametrize("kind", HEADS)
def test_answers_go_on(kind: str) -> None:
    """Sequences that have ended are not written to while others go on, in captured steps."""
    rung, whole = engines(kind, "auto", 3)
    prompts, more = prompts_of(VOCABULARY, 100, 20, 60), prompts_of(VOCABULARY, 4, 4, 4)
    stop = whole.generate(prompts, 3)[0].tokens[-1:]
    first, second = (engine.generate(prompts, 300, stop=stop) for engine in (rung, whole))
    assert first == second
    follow = [[got.tokens[-1], *row] for got, row in zip(first, more, strict=True)]
    assert rung.generate(follow, 5, reuse_prefix=True) == whole.generate(follow, 5, reuse_prefix=True)


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_schedulers_are_those_without(kind: str, kv_cache: KVDtype) -> None:
    answers = []
    for engine in engines(kind, kv_cache, 4):
        scheduler = Scheduler(engine, chunk=64, prefix_cache=2)
        requests = []
        for prompt, new in zip(prompts_of(VOCABULARY, 5, 300, 17, 130, 64, 250), (200, 30, 9, 100, 40, 3), strict=True):
            requests.append(scheduler.submit(prompt, new))
            for _ in range(7):
                scheduler.step()
        while scheduler.step():
            pass
        answers.append([list(request.tokens) for request in requests])
    assert answers[0] == answers[1]
