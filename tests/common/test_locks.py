"""Locks that a fork leaves free, and functions that threads compute once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from qcut.common.locks import Lock, Section, imports_once, once

# Python 3.12 and later warn of forks of processes with threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def in_child(run: Callable[[], bool]) -> bool:
    """What a function returns in a forked child, which has ten seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        ended = 1
        try:
            ended = 0 if run() else 2
        finally:
            os._exit(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def held_by_a_thread(lock: Lock) -> tuple[threading.Thread, threading.Event]:
    taken, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            enough.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    return thread, enough


def test_lock_of_another_thread_is_free_after_fork() -> None:
    lock = Lock()
    thread, enough = held_by_a_thread(lock)

    def take() -> bool:
        with lock:
            return True

    assert in_child(take)
    assert not lock.acquire(blocking=False)  # here the thread still holds it
    enough.set()
    thread.join()
    with lock:
        pass


def test_forking_thread_keeps_its_lock() -> None:
    lock = Lock()

    def let_go() -> bool:
        lock.release()
        with lock:
            return True

    with lock:
        assert in_child(let_go)


def test_once_computes_each_argument_once_across_threads() -> None:
    calls: list[int] = []

    @once
    def double(x: int) -> list[int]:
        calls.append(x)
        time.sleep(0.02)
        return [2 * x]

    together, results = threading.Barrier(8), []

    def run(x: int) -> None:
        together.wait(30)
        results.append(double(x))

    threads = [threading.Thread(target=run, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == [0, 1]
    assert len({id(result) for result in results}) == 2
    double.cache_clear()
    assert double(1) == [2]
    assert len(calls) == 3


def test_once_forgets_a_failure() -> None:
    calls: list[int] = []

    @once
    def fail_first() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not yet")
        return len(calls)

    with pytest.raises(ValueError, match="not yet"):
        fail_first()
    assert fail_first() == fail_first() == 2


def test_fork_waits_for_nested_importing_functions() -> None:
    begun, order = threading.Event(), []

    @imports_once
    def inner() -> None:
        order.append("inner")

    @imports_once
    def outer() -> None:
        begun.set()
        time.sleep(0.2)
        inner()
        order.append("outer")

    thread = threading.Thread(target=outer)
    thread.start()
    begun.wait(30)
    start = time.monotonic()

    def both_are_done() -> bool:
        outer()
        inner()
        return order == ["inner", "outer"]

    assert in_child(both_are_done)
    assert time.monotonic() - start < 20
    thread.join()


def test_fork_waits_until_threads_leave_a_section() -> None:
    section, left = Section(), []
    inside = threading.Barrier(4)

    def work() -> None:
        with section:
            inside.wait(30)  # all at once
            time.sleep(0.2)
            left.append(True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(30)

    def enter() -> bool:
        with section:
            return len(left) == 3

    assert in_child(enter)
    for thread in threads:
        thread.join()


def test_a_thread_forks_inside_a_section() -> None:
    section = Section()

    def enter_again() -> bool:
        with section:
            return True

    start = time.monotonic()
    with section:
        assert in_child(enter_again)
    assert time.monotonic() - start < 20


def test_threads_fork_at_the_same_time() -> None:
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(in_child(lambda: True))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6
    child = threading.Thread(target=lambda: results.append(in_child(lambda: True)))
    child.start()
    child.join(20)
    assert len(results) == 7
