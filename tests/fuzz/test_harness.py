"""The harness finds every kind of failure, planted in a reader, and breaks files the same way twice."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers")

from qcut.errors import PlanError
from tests.fuzz import formats, harness
from tests.fuzz.formats import Format, Read
from tests.fuzz.mutations import mutate
from tests.support.files import scratch

JSON = b'{"format": "x", "values": [1, 2.5, null, {"a": "b"}], "name": "y"}'


def outcomes(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Path], Any], count: int = 3, **more: Any) -> list[str]:
    """Results of cases of a format with a reader that does something else as soon as the file is not the right one."""

    def build(folder: Path) -> None:
        (folder / "file.json").write_bytes(JSON)

    def read(folder: Path) -> Read:
        path = folder / "file.json"
        whole = path.is_file() and path.stat().st_size < 1 << 20 and path.read_bytes() == JSON
        return Read("right") if whole else broken(path)

    one = Format("planted", {"*.json": "json"}, build, read, **more)
    monkeypatch.setitem(formats.FORMATS, "planted", one)
    return [outcome.result for outcome in harness.run([("planted", range(count))], seed=0)]


def refuse(path: Path) -> Read:
    raise PlanError(f"{path}: broken")


def refuse_without_name(path: Path) -> Read:
    raise PlanError("broken")


def fail(path: Path) -> Read:
    raise KeyError("format")


def wait(path: Path) -> Read:
    with contextlib.suppress(Exception):
        time.sleep(60)
    return Read("right")


def swallow(path: Path) -> Read:
    # Far more than is allowed: a machine short of memory may take resident pages away meanwhile.
    return Read("right" if b"x" * (400 << 20) else "")


def swallow_all(path: Path) -> Read:
    return Read([bytearray(1 << 28) for _ in range(100)])


def die(path: Path) -> Read:
    os.kill(os.getpid(), signal.SIGKILL)
    return Read("right")


@pytest.mark.parametrize(
    ("broken", "result"),
    [
        (refuse, "refused"),
        (refuse_without_name, "unnamed"),
        (fail, "foreign"),
        (wait, "hang"),
        (swallow, "memory"),
        (swallow_all, "memory"),
        (die, "crash"),
        (lambda path: Read("right"), "right"),
        (lambda path: Read("other"), "wrong"),
    ],
)
def test_what_a_reader_does_is_seen(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[Path], Any], result: str
) -> None:
    # A busy machine takes seconds to fill memory.
    monkeypatch.setattr(harness, "TIME_LIMIT_S", 0.2 if result == "hang" else 60.0)
    assert outcomes(monkeypatch, broken) == [result] * 3


def test_a_call_that_cannot_be_interrupted_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(path: Path) -> Read:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        return wait(path)

    monkeypatch.setattr(harness, "STUCK_S", 0.8)
    assert outcomes(monkeypatch, block, count=2) == ["hang"] * 2


def test_other_values_are_held_to_an_independent_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(path: Path) -> Read:
        return Read("other", ignored=path.exists())

    def agrees(folder: Path, state: Any) -> bool:
        return state in ("right", "other")

    assert outcomes(monkeypatch, lambda path: Read("other"), agrees=agrees) == ["as stated"] * 3
    assert outcomes(monkeypatch, lambda path: Read("third"), agrees=agrees) == ["wrong"] * 3
    assert outcomes(monkeypatch, lambda path: Read("other", ignored=True), agrees=agrees) == ["left out"] * 3


@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_same_seed_breaks_the_same_way(name: str) -> None:
    with scratch("qcut-fuzz-") as base:
        for one in ("a", "b"):
            (Path(base) / one).mkdir()
        bench, twin = (harness.Bench(formats.FORMATS[name], 5, Path(base) / one) for one in ("a", "b"))
        if name != "kernel-entry":  # built for a machine and its compilers
            assert [(p, (bench.whole / p).read_bytes()) for p, _ in bench.files] == [
                (p, (twin.whole / p).read_bytes()) for p, _ in twin.files
            ]
        whole = {path: (bench.whole / path).read_bytes() for path, _ in bench.files}
        seen, unchanged = set(), 0
        for index in range(100):
            (path, kind), again = (Random(f"{index}").choice(bench.files) for _ in range(2))
            first, second = (mutate(Random(index), whole[path], kind) for _ in range(2))
            assert first == second
            assert again == (path, kind)
            seen.add((path, first.what, first.content))
            unchanged += first.content == whole[path]
        assert len(seen) > 75
        assert unchanged < 10
