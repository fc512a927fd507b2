"""What an engine has captured: by size, the last used, of the kernels of today. Captures themselves: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qcut.backends.cuda.launch import plans
from qcut.engine import graphs, runner
from qcut.engine.engine import Engine
from qcut.engine.graphs import Graphs
from qcut.engine.scheduler import Scheduler
from qcut.numerics.sampling import Sampling
from tests.support.decoders import VOCABULARY, prompts_of, small


def test_the_sizes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    held = Graphs(torch.device("cuda"))
    made: list[int] = []

    def get(size: int) -> int:
        return held.get(size, lambda: made.append(size) or 10 * size)

    assert [get(size) for size in (1, 2, 3, 1, 4, 1, 3, 2)] == [10, 20, 30, 10, 40, 10, 30, 20]
    assert made == [1, 2, 3, 4, 2]
    assert held.count == 3


def test_plans_forgotten_are_graphs_forgotten() -> None:
    held = Graphs(torch.device("cuda"))
    first = held.get("a", object)
    held.refresh()
    assert held.get("a", object) is first
    before = plans.generation()
    plans.forget_plans()
    assert plans.generation() > before
    assert held.get("a", object) is first  # within a request
    held.refresh()
    assert held.count == 0
    second = held.get("a", object)
    held.refresh()
    assert held.get("a", object) is second is not first


class Replay:
    """A graph on the CPU: what was captured, done again."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What engines have captured; captures need no GPU."""
    found: list[object] = []

    def run_and_capture(self: Graphs, run: Callable[[], object], before: Callable[[], object] | None = None) -> Replay:
        (before or run)()
        run()
        found.append(run)
        return Replay(run)

    monkeypatch.setattr(Graphs, "run_and_capture", run_and_capture)
    return found


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_inference_mode_may_come_and_go(made: bool, first: bool, captured: list[object]) -> None:
    model, prompts = small("llama"), prompts_of(VOCABULARY, 5, 9)
    with torch.inference_mode(made):
        engine = Engine(model, batch=2)
    engine.runner.graphs = Graphs(torch.device("cpu"))
    with torch.inference_mode(first):
        want = engine.generate(prompts, 4)
    with torch.inference_mode(not first):
        assert engine.generate(prompts, 4) == want


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_an_engine_of_graphs_gives_what_one_of_launches_gives(kv_cache: Any, captured: list[object]) -> None:
    model = small("llama")
    launched, replayed = (Engine(model, batch=3, kv_cache=kv_cache) for _ in range(2))
    replayed.runner.graphs = Graphs(torch.device("cpu"))
    sizes = ((5, 9), (1, 1, 1), (30,), (7, 12), (40, 3), (2, 2), (6, 14), (29,), (1,), (8, 8, 8))
    for turn in range(2):
        for lengths in sizes:
            prompts = prompts_of(VOCABULARY, *lengths)
            if turn:
                replayed.runner.max_prefill_tokens = launched.runner.max_prefill_tokens = 16
            assert torch.equal(replayed.prefill(prompts), launched.prefill(prompts))
            assert torch.equal(replayed.decode(range(len(lengths))), launched.decode(range(len(lengths))))
            more = [prompt[:4] for prompt in prompts]
            assert replayed.generate(more, 5, reuse_prefix=True) == launched.generate(more, 5, reuse_prefix=True)
            hot = Sampling(temperature=1.0, seed=turn)
            assert replayed.generate(prompts, 5, sampling=hot) == launched.generate(prompts, 5, sampling=hot)
            for one, other in zip(replayed.score(prompts), launched.score(prompts), strict=True):
                assert torch.equal(one, other)
        if not turn:
            count = len(captured)
            assert count == replayed.runner.graphs.count < 2 * len(sizes)
    plans.forget_plans()
    replayed.prefill([[1, 2, 3]])
    assert replayed.runner.graphs.count == 1
    plans.forget_plans()
    replayed.decode([4])  # only steps, too
    assert replayed.runner.graphs.count == 1


@pytest.mark.parametrize(
    ("batch", "chunk", "max_waiting", "first"), [(5, 48, 64, 512), (8, 100, 64, 16), (8, 16, 3, 16), (1, 1, 1, 512)]
)
def test_nothing_is_captured_once_a_scheduler_is_warm(
    batch: int, chunk: int, max_waiting: int, first: int, captured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FIRST_BUCKET", first)
    engine = Engine(small("llama"), batch=batch)
    engine.runner.graphs = Graphs(torch.device("cpu"))
    scheduler = Scheduler(engine, chunk=chunk, max_waiting=max_waiting)
    scheduler._batch.runs_ahead = True  # as on a GPU
    scheduler.warm_up()
    count = len(captured)
    steps = engine.runner.graphs.count * len(runner.buckets(engine.context))
    assert count == steps + scheduler._prefill_runner.graphs.count  # type: ignore[union-attr]
    for turn in range(12):
        for prompt in prompts_of(
            VOCABULARY, *(1 + (7 * turn + 11 * i) % 60 for i in range(min(max_waiting, turn + 1)))
        ):
            scheduler.submit(prompt, 1 + turn % 4)
        while scheduler.step():
            pass
    assert len(captured) == count


@pytest.mark.parametrize("kind", ["llama", "mistral_window"])
def test_sequences_come_to_further_buckets(kind: str, captured: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = small(kind), prompts_of(VOCABULARY, 5, 1, 14)
    plain = Engine(model, batch=4, context=40)
    want, one = plain.generate(prompts), plain.generate(prompts[:1], 30)
    monkeypatch.setattr(runner, "FIRST_BUCKET", 8)
    launched, replayed, served = (Engine(model, batch=4, context=40) for _ in range(3))
    replayed.runner.graphs, served.runner.graphs = Graphs(torch.device("cpu")), Graphs(torch.device("cpu"))
    assert launched.generate(prompts) == want
    assert replayed.generate(prompts) == want
    count = len(captured)
    assert count == replayed.runner.graphs.count + 2, "steps of up to 16, 32 and 40 tokens"
    assert replayed.generate(prompts) == want
    assert len(captured) == count
    assert replayed.generate(prompts[:1], 30) == one
    for engine in (launched, replayed):
        engine.prefill(prompts[:1])
        assert [int(engine.decode([token]).argmax()) for token in one[0].tokens[:-1]] == one[0].tokens[1:]
    scheduler = Scheduler(served, chunk=16)
    requests = [scheduler.submit(prompt) for prompt in prompts]
    while scheduler.step():
        pass
    assert [request.result() for request in requests] == want
