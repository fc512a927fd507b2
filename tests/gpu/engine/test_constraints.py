"""Constraints on a GPU: masks are found while graphs run, and answers have their form next to free ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qcut import Constraint, Engine, Lookup, Sampling, Scheduler
from qcut.numerics.sampling import only_allowed
from tests.gpu.support.oracles import DEVICE
from tests.support import ROOT

pytest.importorskip("llguidance")

MODEL = ROOT / "models" / "gpt2-5m"
NUMBERS = Constraint.regex("[0-9]{3}(-[0-9]{3}){4}")
LETTERS = Constraint.regex("[a-z]{400,450}")
WAYS = (Sampling(), Sampling(1.0, seed=3), Sampling(1.2, top_k=30, top_p=0.9, presence_penalty=0.5, seed=4))


def engine_of(batch: int, **options: Any) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float16).to(DEVICE)
    return Engine(model, tokenizer=AutoTokenizer.from_pretrained(MODEL), batch=batch, **options)


def finished(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
def test_answers_have_their_form(graphs: bool, drafts: int) -> None:
    speculate = Lookup(drafts) if drafts else None
    scheduler = Scheduler(engine_of(4, graphs=graphs, speculate=speculate))
    requests = [scheduler.submit("1 2 3 1 2 3 ", constraint=NUMBERS, sampling=way) for way in WAYS for _ in range(3)]
    free = [scheduler.submit("a b c a b c ", 25, sampling=way) for way in WAYS]
    finished(scheduler)
    for request in requests:
        assert re.fullmatch(NUMBERS.text, request.result().text or "")
        assert request.reason == "stop"
    assert [len(request.tokens) for request in free] == [25] * 3


def test_neighbours_keep_their_tokens() -> None:
    scheduler = Scheduler(engine_of(3), prefix_cache=0)

    def neighbours(constraint: Constraint | None) -> list[list[int]]:
        requests = [
            scheduler.submit("def f(", 30, sampling=way, constraint=constraint if i == 1 else None)
            for i, way in enumerate(WAYS)
        ]
        finished(scheduler)
        assert constraint is None or re.fullmatch("[a-z]+", requests[1].result().text or "")
        return [requests[0].tokens, requests[2].tokens]

    assert neighbours(LETTERS) == neighbours(None)


def test_masks_are_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 1001, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (4, 34), generator=generator, dtype=torch.int32)
    found = only_allowed(logits.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(found.cpu(), only_allowed(logits, masks))
