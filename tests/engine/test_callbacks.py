"""What callbacks and listeners may call, in their thread and through others: what works, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from qcut.engine.engine import Engine
from qcut.engine.request import Request
from qcut.engine.scheduler import Scheduler
from qcut.engine.sequence import Event
from qcut.errors import BusyError, ConfigError, RequestError
from tests.support.decoders import small

SOON = 60


@pytest.fixture(scope="module")
def model() -> Any:
    return small("llama")


@pytest.fixture
def engine(model: Any) -> Engine:
    return Engine(model, batch=2, context=64)


@pytest.fixture
def another_thread() -> Iterator[Callable[..., Any]]:
    """Waits for a call in another thread."""
    with ThreadPoolExecutor(2) as pool:
        yield lambda call, *given: pool.submit(call, *given).result(timeout=SOON)


# ── on_token ─────────────────────────────────────────────────────────────────────────────────────

CALLS: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate([[1, 2]], 2),
    "stream": lambda engine: list(engine.stream([[1, 2]], 2)),
    "prefill": lambda engine: engine.prefill([[1, 2]]),
    "decode": lambda engine: engine.decode([1]),
    "score": lambda engine: engine.score([[1, 2]]),
    "warm_up": lambda engine: engine.warm_up([4]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_callback_that_waits_for_its_engine(
    call: Callable[[Engine], object], engine: Engine, another_thread: Callable[..., Any]
) -> None:
    engine.lock.callback_s = 0.1
    with pytest.raises(BusyError, match="in an on_token callback of another thread, since"):
        engine.generate([[1, 2, 3]], 4, on_token=lambda *_: another_thread(call, engine))
    assert len(another_thread(engine.generate, [[1, 2, 3]], 4)[0].tokens) == 4


def test_callback_that_waits_for_a_request(engine: Engine) -> None:
    engine.lock.callback_s = 0.1
    with Scheduler(engine) as scheduler:
        with pytest.raises(BusyError, match="in an on_token callback"):
            engine.generate([[1, 2, 3]], 4, on_token=lambda *_: scheduler.submit([1, 2], 2).result())
        assert len(scheduler.submit([1, 2], 2).result().tokens) == 2


def test_a_refused_call_may_be_caught(engine: Engine, another_thread: Callable[..., Any]) -> None:
    engine.lock.callback_s = 0.1

    def wait(*_: int) -> None:
        with pytest.raises(BusyError):
            another_thread(engine.prefill, [[1]])

    want = engine.generate([[1, 2, 3]], 3)
    assert engine.generate([[1, 2, 3]], 3, on_token=wait) == want


def test_calls_outwait_many_callbacks(engine: Engine) -> None:
    engine.lock.callback_s = 0.5
    pause = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()

        def slow(*_: int) -> None:
            started.set()
            pause.wait(0.1)

        first = pool.submit(engine.generate, [[1, 2, 3]], 20, on_token=slow)
        assert started.wait(SOON)
        second = engine.generate([[1, 2, 3]], 20)
        assert first.result(timeout=SOON) == second


def test_stream_consumer_may_wait_for_its_engine(engine: Engine, another_thread: Callable[..., Any]) -> None:
    stream = engine.stream([[1, 2, 3]], 4)
    next(stream)
    assert len(another_thread(engine.generate, [[1, 2]], 2)) == 1
    with pytest.raises(ConfigError, match="the engine has served another call since"):
        next(stream)


# ── listeners ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 0, "prompt_top": 1}])
def test_listener_may_wait_for_the_engine(
    options: dict[str, Any], engine: Engine, another_thread: Callable[..., Any]
) -> None:
    found: list[object] = []

    def listener(event: Event) -> None:
        if not found:
            found.append(None)
            found[0] = another_thread(engine.generate, [[1, 2]], 2)

    with Scheduler(engine) as scheduler:
        request = scheduler.submit([1, 2, 3], **({"max_new_tokens": 4} | options), listener=listener)
        with contextlib.suppress(ConfigError):  # the engine has served another call
            another_thread(request.result)
        assert found == [engine.generate([[1, 2]], 2)]
        assert len(scheduler.submit([1, 2, 3], 4).result().tokens) == 4


def test_listener_of_a_failure_may_wait(engine: Engine, another_thread: Callable[..., Any]) -> None:
    found: list[object] = []

    def listener(event: Event) -> None:
        if event.reason == "failed":
            found.append(another_thread(engine.generate, [[1, 2]], 2))

    scheduler = Scheduler(engine)
    request = scheduler.submit([1, 2, 3], 20, listener=listener)
    while not request.tokens:
        scheduler.step()
    want = engine.generate([[1, 2]], 2)
    while scheduler.step():
        pass
    assert (request.reason, found) == ("failed", [want])


@pytest.mark.parametrize("threaded", [False, True])
def test_listener_that_waits_for_a_request(
    threaded: bool, engine: Engine, another_thread: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(engine)
    going, done = scheduler.submit([1, 2, 3], 40), scheduler.submit([4], 1)
    while done.reason is None:
        scheduler.step()
    results: list[object] = []

    def listener(event: Event) -> None:
        results.append(done.result())
        results.append(going.result())

    waiting = scheduler.submit([1, 2, 3], 4, listener=listener)
    if threaded:
        scheduler.run()
    scheduler.close()
    assert another_thread(waiting.result).reason == "cancelled"
    assert results == [done.generated] * 2  # at its first token, and when it is cancelled
    assert "a listener waits for a request; allowed: for one that has ended" in caplog.text
    assert len(going.result().tokens) == 40


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_listener_may_close(threaded: bool, cancel: bool, engine: Engine, another_thread: Callable[..., Any]) -> None:
    scheduler = Scheduler(engine)
    want = engine.generate([[1, 2, 3]], 20)[0]
    other = scheduler.submit([1, 2, 3], 20)
    closing = scheduler.submit([4], 5, listener=lambda event: scheduler.close(cancel=cancel))
    if threaded:
        scheduler.run()
    else:
        while scheduler.step():
            pass
    assert another_thread(closing.result).reason == ("cancelled" if cancel else "length")
    if cancel:
        assert other.result().reason == "cancelled"
    else:
        assert other.result() == want
    with pytest.raises(BusyError, match="the scheduler closes"):
        scheduler.submit([1])
    scheduler.close()


def test_steps_inside_steps_are_refused(engine: Engine, another_thread: Callable[..., Any]) -> None:
    scheduler, refused = Scheduler(engine), list[BaseException]()
    want = engine.generate([[1, 2, 3]], 6)[0]

    def listener(event: Event) -> None:
        for step in (scheduler.step, lambda: another_thread(scheduler.step)):
            with pytest.raises(ConfigError, match="the scheduler is in a step already; allowed: one thread") as error:
                step()
            refused.append(error.value)

    inner, other = scheduler.submit([5], 3, listener=listener), scheduler.submit([1, 2, 3], 6)
    while scheduler.step():
        pass
    assert (inner.reason, len(refused), other.result()) == ("length", 6, want)


def test_a_step_next_to_a_running_thread(engine: Engine, another_thread: Callable[..., Any]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def listener(event: Event) -> None:
        entered.set()
        assert leave.wait(SOON)

    want = engine.generate([[1, 2, 3]], 6)[0]
    with Scheduler(engine) as scheduler:
        request = scheduler.submit([1, 2, 3], 6, listener=listener)
        assert entered.wait(SOON)
        with pytest.raises(ConfigError, match="the scheduler is in a step already"):
            scheduler.step()
        leave.set()
        assert another_thread(request.result) == want
        assert another_thread(scheduler.submit([1, 2, 3], 6).result) == want


def test_a_thread_begins_in_a_listener(engine: Engine, another_thread: Callable[..., Any]) -> None:
    want, scheduler = engine.generate([[1, 2, 3]], 6)[0], Scheduler(engine)

    def listener(event: Event) -> None:
        scheduler.run()
        threading.Event().wait(0.05)  # until the thread would step

    request = scheduler.submit([1, 2, 3], 6, listener=listener)
    while scheduler.load.running or scheduler.load.waiting:
        try:
            scheduler.step()
        except ConfigError:
            break  # the thread does it
    assert another_thread(request.result) == want
    scheduler.close()
    assert scheduler.error is None


def test_requests_of_a_dropped_scheduler_fail(engine: Engine, another_thread: Callable[..., Any]) -> None:
    scheduler = Scheduler(engine)
    running = scheduler.submit([1, 2, 3], 20)
    while not running.tokens:
        scheduler.step()
    waiting = scheduler.submit([1, 2, 3], 20)
    del scheduler
    gc.collect()
    for request in (running, waiting):
        with pytest.raises(RequestError, match="the scheduler is gone; allowed: to keep it until"):
            another_thread(request.result)


def test_arguments_that_are_no_functions_or_lists(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="on_token is 5; allowed: a function of an index and a token, or None"):
        engine.generate([[1]], 2, on_token=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lengths is 3; allowed: a list of numbers, \[3\] for one"):
        engine.warm_up(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch is 0; allowed: 1 and more"):
        engine.with_batch(0)


def test_listeners_submit(engine: Engine, another_thread: Callable[..., Any]) -> None:
    more: list[Request] = []
    with Scheduler(engine) as scheduler:
        first = scheduler.submit([1, 2], 3, listener=lambda _: more.append(scheduler.submit([1, 2], 3)))
        another_thread(first.result)
        assert [another_thread(request.result) for request in more] == [first.generated] * 3
