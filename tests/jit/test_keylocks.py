"""Locks of keys: they exclude threads and processes, die with their holder, and nobody waits for a stopped one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qcut.jit import keylocks
from tests.common.test_locks import in_child
from tests.support import ROOT

KEY = "ab" * 32
# Python 3.12 and later warn of forks of processes with threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "locks" / f"{KEY[:40]}.lock"


@contextmanager
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `KEY` until a test ends it."""
    script = (
        "import sys\nfrom qcut.jit import keylocks\nkeylocks.BEAT_S = 0.1\n"
        f"with keylocks.locked({KEY!r}):\n  print('held', flush=True)\n  sys.stdin.readline()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_lock_excludes_threads(lock_file: Path) -> None:
    inside, most = 0, 0

    def visit() -> None:
        nonlocal inside, most
        with keylocks.locked(KEY):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=visit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_slow_holder_is_waited_for(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keylocks, "PATIENCE_S", 2.0)
    with holder() as process:
        end = threading.Timer(4.0, lambda: process.communicate("\n"))
        end.start()
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with keylocks.locked(KEY):
                assert process.wait(10) == 0
                assert time.monotonic() - start > 3.5
        end.join()


def test_a_stopped_holder_is_not_waited_for(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keylocks, "PATIENCE_S", 0.5)
    with holder() as process:
        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.warns(RuntimeWarning) as caught, keylocks.locked(KEY):
            waited = time.monotonic() - start
        assert 0.5 <= waited < 20
        assert [str(warning.message) for warning in caught] == [
            f"qcut kernel cache: process {process.pid}, which builds a kernel, has shown no life for 0 s "
            f"(lock {lock_file}); this process builds the kernel too"
        ]
        assert process.poll() is None


def test_a_killed_holder_is_not_waited_for(lock_file: Path) -> None:
    with holder() as process:
        process.kill()
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with keylocks.locked(KEY):
                assert time.monotonic() - start < 20


def test_a_fork_takes_no_lock_along(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a thread's process waits for the thread like any other process, and holds nothing when that dies."""
    monkeypatch.setattr(keylocks, "PATIENCE_S", 60.0)
    script = (
        "import os, signal, sys, time\nfrom qcut.jit import keylocks\n"
        f"with keylocks.locked({KEY!r}):\n"
        "  if os.fork() == 0:\n    time.sleep(30)\n    os._exit(0)\n"
        "  print('held', flush=True)\n  sys.stdin.readline()\n  os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "held\n"
        process.stdin.write("\n")
        process.stdin.flush()
        try:
            assert process.wait(20) == -signal.SIGKILL
            start = time.monotonic()
            with keylocks.locked(KEY):
                assert time.monotonic() - start < 20
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_child_locks_what_its_parent_held(lock_file: Path) -> None:
    """The copy of the descriptor neither frees the parent's lock nor stands in the child's way."""

    def lock_another() -> bool:
        with keylocks.locked("cd" * 32):
            return True

    with keylocks.locked(KEY):
        assert in_child(lock_another)
        busy = subprocess.run(["flock", "--nonblock", str(lock_file), "true"], check=False)
        assert busy.returncode == 1
    assert subprocess.run(["flock", "--nonblock", str(lock_file), "true"], check=False).returncode == 0


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_something_else_in_the_locks_place_stops_nobody(lock_file: Path, plant: object) -> None:
    lock_file.parent.mkdir(mode=0o700, parents=True)
    plant(lock_file)  # type: ignore[operator]
    with keylocks.locked(KEY):
        pass
