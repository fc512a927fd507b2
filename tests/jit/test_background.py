"""Builds in the background: what becomes of results and failures, and of everything when a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from qcut.emitters.core.source import KernelSource
from qcut.jit import background, find
from qcut.jit.background import Builder, Job, kernel_job
from tests.jit import jobs
from tests.support import ROOT

TEXT = 'extern "C" __global__ void one(int* x) { *x = 1; }'
DEADLINE_S = 30.0


@pytest.fixture
def builder() -> Iterator[Builder]:
    made = Builder(jobs=1)
    yield made
    assert made.wait(DEADLINE_S)


def job(key: str, function: Callable[..., Any], *args: Any, keep: Callable[[Any], None] = lambda result: None) -> Job:
    return Job(key, f"job {key}", function, args, keep)


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_results_come_back_and_take_over_together(builder: Builder) -> None:
    kept: list[Any] = []
    taken: list[int] = []
    builder.listen(lambda: taken.append(len(kept)))
    for key in "abc":
        assert builder.later(job(key, jobs.facts, key, keep=kept.append), first=key == "b")
    assert builder.outstanding() == ["job a", "job b", "job c"]
    assert builder.wait(DEADLINE_S)
    assert builder.outstanding() == []
    assert [value for value, *_ in kept] == ["a", "b", "c"]
    assert taken == [3]
    ((pid, niceness, session),) = {tuple(rest) for _, *rest in kept}
    assert pid != os.getpid()
    assert niceness == min(19, os.nice(0) + 10)
    assert session == pid  # no signal of the terminal reaches it
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_finished_work_is_not_kept_back_for_long(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "HANDOVER_S", 0.0)
    kept: list[Any] = []
    taken: list[int] = []
    builder.listen(lambda: taken.append(len(kept)))
    for key in "ab":
        builder.later(job(key, jobs.facts, key, keep=kept.append), first=True)
    assert builder.wait(DEADLINE_S)
    assert taken == [1, 2]


def test_listeners_hear_only_of_awaited_results(builder: Builder) -> None:
    taken: list[int] = []
    builder.listen(lambda: taken.append(1))
    builder.later(job("a", jobs.facts, "a"))
    assert builder.wait(DEADLINE_S)
    assert not taken


def test_jobs_run_once_and_awaited_ones_first(builder: Builder, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    builder.later(job("a", jobs.note, str(path), "a", 0.5))
    for key, first in (("b", False), ("c", False), ("b", False), ("d", True), ("c", True), ("a", True)):
        assert builder.later(job(key, jobs.note, str(path), key), first=first)
    assert builder.wait(DEADLINE_S)
    assert path.read_text().split() == ["a", "c", "d", "b"]


@pytest.mark.parametrize(
    ("function", "args", "text"),
    [
        (jobs.refuse, ("oops",), r"(?s)job bad cannot be built.*kernel x: nvcc ended with 1.*oops"),
        (jobs.stumble, (), "ZeroDivisionError: of no kind that is foreseen"),
        (jobs.die, (3,), r"(?s)job bad cannot be built.*its process ended \(status 3\)\nlast words"),
    ],
)
def test_failure_warns_once_and_stops_no_other_job(
    builder: Builder, function: Callable[..., Any], args: tuple[Any, ...], text: str
) -> None:
    kept: list[Any] = []
    taken: list[int] = []
    builder.listen(lambda: taken.append(len(kept)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert builder.later(job("bad", function, *args))
        builder.later(job("good", jobs.facts, 1, keep=kept.append), first=True)
        assert builder.wait(DEADLINE_S)
        assert not builder.later(job("bad", function, *args))
        assert builder.outstanding() == []
    assert len(told) == 1
    with pytest.raises(RuntimeWarning, match=text):
        raise told[0].message  # type: ignore[misc]
    assert (len(kept), taken) == (1, [1])


def test_result_that_cannot_be_kept_is_a_failure(builder: Builder) -> None:
    def refuse(result: object) -> None:
        raise MemoryError("no room")

    builder.later(job("a", jobs.facts, 1, keep=refuse))
    with pytest.warns(RuntimeWarning, match="job a cannot be built.*MemoryError: no room"):
        assert builder.wait(DEADLINE_S)
    assert not builder.later(job("a", jobs.facts, 1))


def test_waiting_ends_with_the_time(builder: Builder, tmp_path: Path) -> None:
    builder.later(job("a", jobs.note, str(tmp_path / "notes"), "a", 0.5))
    start = time.monotonic()
    assert not builder.wait(0.05)
    assert time.monotonic() - start < 0.4


def test_kernel_is_found_afterwards_without_a_cache(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "file" / "cache"))  # cannot be made
    monkeypatch.setattr(import_module("qcut.jit.build"), "_memory", {})
    source = KernelSource("one", TEXT, "one", (), "sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find(source) is None
        builder.later(kernel_job(source))
        assert builder.wait(DEADLINE_S)
        binary = find(source)
    assert binary is not None
    assert binary.cubin.startswith(b"\x7fELF")


# ── the end of processes ─────────────────────────────────────────────────────────────────────────

PARENT = """
import os, sys, time
from qcut.jit.background import Job, builder
from tests.jit import jobs
report = sys.argv[1]
builder.later(Job("a", "a", jobs.compile_for, (60, report), lambda result: None))
for _ in range(1000):
    if os.path.exists(report): break
    time.sleep(0.02)
print("runs", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 15)", -15),
        ("pid = os.fork()\nif pid == 0: time.sleep(30)\nos.kill(os.getpid(), 9)", -9),
    ],
    ids=["ends", "exits", "is killed", "is terminated", "forks, and is killed"],
)
def test_compilers_end_with_the_process(end: str, status: int, tmp_path: Path) -> None:
    """At once, and their folders are deleted, whatever ended the process."""
    report = tmp_path / "report"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT + end, str(report)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"runs\n"
    start = time.monotonic()
    assert process.wait(DEADLINE_S) == status
    assert time.monotonic() - start < 10
    pid, folder = report.read_text().split()
    process.stdout.close()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"  # nobody may have buried it yet
        except OSError:  # before it is opened, or before it is read
            return True

    assert eventually(gone)
    assert eventually(lambda: not Path(folder).exists())


def test_forked_child_has_no_jobs_of_its_parent(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "builder", builder)
    kept: list[Any] = []
    builder.later(job("a", jobs.note, str(tmp_path / "notes"), "a", 0.3))
    builder.later(job("b", jobs.facts, 1, keep=kept.append))
    if (child := os.fork()) == 0:
        own: list[Any] = []
        good = builder.outstanding() == []
        good &= builder.later(job("b", jobs.facts, 2, keep=own.append)) and builder.wait(DEADLINE_S)
        os._exit(0 if good and own[0][0] == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert builder.wait(DEADLINE_S)
    assert [value for value, *_ in kept] == [1]


def test_the_terminals_signals_do_not_reach_compilers(builder: Builder, tmp_path: Path) -> None:
    report = tmp_path / "report"
    builder.later(job("a", jobs.compile_for, 1, str(report)))
    assert eventually(report.exists)
    pid = int(report.read_text().split()[0])
    assert os.getpgid(pid) != os.getpgid(0)
    assert signal.getsignal(signal.SIGINT) is not None
    assert builder.wait(DEADLINE_S)
