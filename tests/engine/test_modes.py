"""Callers' modes of torch do not change what the engine computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import qcut
from qcut.engine.engine import Engine
from qcut.engine.scheduler import Scheduler
from qcut.numerics.sampling import Sampling
from tests.support.decoders import VOCABULARY, prompts_of, small

PROMPTS = prompts_of(VOCABULARY, 9, 4)
DRAWN = Sampling(1.0, seed=2, repetition_penalty=1.2)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "bfloat16": lambda: default(torch.bfloat16),
    "float64": lambda: default(torch.float64),
    "inference_mode": torch.inference_mode,
}


def everything(engine: Engine) -> list[Any]:
    logits = [engine.prefill(PROMPTS), engine.decode([3, 4]), *engine.score(PROMPTS)]
    tokens = [found.tokens for found in engine.generate(PROMPTS, 6, sampling=DRAWN)]
    return [*(x.tolist() for x in logits), logits[0].dtype, tokens, [e.token for e in engine.stream(PROMPTS, 4)]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "scheme"), [("llama", None), ("gpt2", "w8a8"), ("phi3_long", "w8a16")])
def test_modes_change_nothing(kind: str, scheme: str | None, mode: str) -> None:
    model = small(kind)
    if scheme is not None:
        qcut.quantize(model, scheme, progress=False)
    engine, made = Engine(model, context=40, batch=2), MODES[mode]
    want = everything(engine)
    with made():
        inside = Engine(model, context=40, batch=2)
        assert everything(engine) == want
        assert everything(inside) == want
    assert everything(inside) == want


def test_scheduler_steps_in_any_mode() -> None:
    model = small("llama")
    want = [found.tokens for found in Engine(model, context=40, batch=2).generate(PROMPTS, 8, sampling=DRAWN)]
    with torch.inference_mode():
        scheduler = Scheduler(Engine(model, context=40, batch=2))
        first = scheduler.submit(PROMPTS[0], 8, sampling=DRAWN)
        scheduler.step()
    scheduler.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        while scheduler.step():
            pass
    assert first.tokens == want[0]
    with torch.inference_mode(), scheduler:
        assert scheduler.submit(PROMPTS[0], 8, sampling=DRAWN).result().tokens == want[0]
