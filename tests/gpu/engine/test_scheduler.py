"""Continuous batching on the GPU: the CPU's tokens, whoever comes and goes, with steps queued ahead of the host."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from qcut.engine.engine import Engine
from qcut.engine.scheduler import Scheduler
from qcut.engine.sequence import Generated
from qcut.numerics.sampling import Sampling
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE
from tests.support.decoders import VOCABULARY, prompts_of

LENGTHS = (5, 1, 100, 17, 2, 60, 9, 23)
NEWS = (7, 1, 30, 20, 3, 9, 40, 15)
WAYS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(1.5, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=2**63),
)


def finished(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if not scheduler.step():
            return
    raise AssertionError(f"not done: {scheduler.load}")


def by_itself(model: Any, prompt: list[int], new: int, **options: Any) -> Generated:
    (found,) = Engine(model, **{name: options.pop(name) for name in ("kv_cache",) if name in options}).generate(
        [prompt], new, **options
    )
    return found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_admitted_and_retired_sequences_get_the_cpus_tokens(graphs: bool, kv_cache: Any) -> None:
    cpu = llama(None, torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, *LENGTHS)
    want = [by_itself(cpu, p, n, kv_cache=kv_cache) for p, n in zip(prompts, NEWS, strict=True)]
    engine = Engine(copy.deepcopy(cpu).to(DEVICE), batch=3, kv_cache=kv_cache, graphs=graphs)
    scheduler = Scheduler(engine, chunk=32, prefix_cache=2)
    requests = []
    for prompt, new in zip(prompts, NEWS, strict=True):
        requests.append(scheduler.submit(prompt, new))
        scheduler.step()
        scheduler.step()
    finished(scheduler)
    assert [request.result() for request in requests] == want


def test_every_way_of_choosing_tokens_is_each_sequences_own() -> None:
    cpu = llama(None, torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, 6, 11, 3, 19)
    want = [by_itself(cpu, p, 20, sampling=way, top=2) for p, way in zip(prompts, WAYS, strict=True)]
    scheduler = Scheduler(Engine(copy.deepcopy(cpu).to(DEVICE), batch=4))
    requests = [scheduler.submit(p, 20, sampling=way, top=2) for p, way in zip(prompts, WAYS, strict=True)]
    finished(scheduler)
    for request, one in zip(requests, want, strict=True):
        found = request.result()
        assert found.tokens == one.tokens
        pairs = zip(found.log_probabilities or [], one.log_probabilities or [], strict=True)
        assert [a.chosen for a, _ in pairs] == pytest.approx([b.chosen for b in one.log_probabilities or []], abs=1e-3)


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_a_thread_serves_many_clients_the_same_twice(scheme: str) -> None:
    """Nothing is lost, mixed or left; in which batches sequences run is up to the clock."""
    engine = Engine(llama(scheme), batch=8)
    prompts = prompts_of(VOCABULARY, *(3 + 7 * i % 50 for i in range(24)))
    scheduler = Scheduler(engine, chunk=64)
    scheduler.warm_up()
    assert engine.runner.graphs is not None
    steps = {size for size in engine.runner.graphs._made if isinstance(size, tuple) and size[0] == "steps"}
    assert steps == {("steps", 1 << i) for i in range(4)}
    assert scheduler.load.new_tokens == scheduler.load.prefix_cache_tokens == 0
    answers: dict[int, list[int]] = {}

    def client(i: int) -> None:
        answers[i] = scheduler.submit(prompts[i], 1 + i % 13).result().tokens

    with scheduler:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(answers[i]) for i in range(24)] == [1 + i % 13 for i in range(24)]
    load = scheduler.load
    assert (load.waiting, load.prefilling, load.running) == (0, 0, 0)
    firsts = [engine.generate([prompt], 1)[0].tokens[0] for prompt in prompts]
    assert sum(answers[i][0] == first for i, first in enumerate(firsts)) >= 22, "near ties are few"


def test_cancelled_sequences_leave_and_others_go_on() -> None:
    cpu = llama(None, torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, 6, 11, 30)
    want = by_itself(cpu, prompts[1], 40)
    scheduler = Scheduler(Engine(copy.deepcopy(cpu).to(DEVICE), batch=3))
    first, second, third = (scheduler.submit(prompt, 40) for prompt in prompts)
    for _ in range(6):
        scheduler.step()
    first.cancel()
    third.cancel()
    finished(scheduler)
    assert second.result() == want
    assert first.result().reason == third.result().reason == "cancelled"
    assert len(first.tokens) < 40
