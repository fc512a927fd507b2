"""Builds in the background, in a process of their own, for callers with a fallback.

The process (`qcut.jit.builder`) runs as long as there is work, at low priority. It ends with its parent, however
the parent ends, and stops its compilers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qcut.common.locks import Lock
from qcut.emitters.core.source import KernelSource
from qcut.jit.build import build, default_jobs, fingerprint, remember

HANDOVER_S = 10.0
"""Most seconds that a finished build waits for others, so that few take-overs serve many builds."""

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from qcut.jit.builder import main; main()"


@dataclass(frozen=True)
class Job:
    """Work for the process in the background.

    Attributes:
        key: identifies the work: of two jobs with one key, the second is not done.
        name: what is built, for messages.
        function: a function of a module; importing the module must be enough to have it.
        args: its arguments, which pickle.
        keep: called with the result, here.
    """

    key: str
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    keep: Callable[[Any], None]


def kernel_job(source: KernelSource) -> Job:
    """The build of a kernel; the result is where `qcut.jit.find` looks."""
    return Job(fingerprint(source), source.name, build, (source,), remember)


class Builder:
    """The jobs of this process that are not done, and the process that does them. Threads may share it.

    Args:
        jobs: most jobs at a time; None decides by cores and memory.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._lock = Lock()
        self._changed = threading.Condition(threading.Lock())
        self._jobs = jobs
        self._waiting: list[Job] = []
        self._running: dict[str, Job] = {}
        self._finished: list[str] = []  # since the last take-over, and when the first of them was
        self._since = 0.0
        self._failed: set[str] = set()
        self._awaited: set[str] = set()  # jobs with results that callers wait for
        self._listeners: list[Callable[[], None]] = []
        self._process: subprocess.Popen[bytes] | None = None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a function, from another thread, when results of jobs that came ``first`` may take over."""
        self._listeners.append(listener)

    def later(self, job: Job, *, first: bool = False) -> bool:
        """Do a job in the background, unless it is waiting, running, or has failed.

        Args:
            job: what to do.
            first: before the jobs that wait, since a caller uses something slower until then.

        Returns:
            Whether the job is still to be done: False after it has failed, with a warning.
        """
        with self._lock:
            if job.key in self._failed:
                return False
            known = next((other for other in self._waiting if other.key == job.key), None)
            if job.key not in self._running and (known is None or first):
                if known is not None:
                    self._waiting.remove(known)
                self._waiting.insert(0 if first else len(self._waiting), job)
                self._feed()
            if first:
                self._awaited.add(job.key)
            return job.key not in self._failed

    def outstanding(self) -> list[str]:
        """Names of what is not built yet."""
        with self._lock:
            return [job.name for job in (*self._running.values(), *self._waiting)]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no job is outstanding and the results have taken over.

        Args:
            timeout: in seconds; None waits as long as it takes.

        Returns:
            Whether that is so.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.outstanding():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            with self._changed:
                self._changed.wait(1.0 if left is None else min(left, 1.0))
        return True

    # ── the process ──────────────────────────────────────────────────────────────────────────────

    def _feed(self) -> None:
        """Hand jobs to the process, started if need be. The lock is held."""
        most = self._jobs or background_jobs()
        while self._waiting and len(self._running) < most:
            job = self._waiting.pop(0)
            try:
                if self._process is None:
                    self._process = self._started()
                _send(self._process, pickle.dumps((job.key, job.function, job.args)))
            except OSError as error:
                self._failed.add(job.key)
                _warn(job.name, f"its process does not take it: {error.strerror or error}")
            else:
                self._running[job.key] = job

    def _started(self) -> subprocess.Popen[bytes]:
        errors = os.memfd_create("qcut-builder", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a terminal's Ctrl-C is for the user's own work
            )
        except OSError:
            os.close(errors)
            raise
        threading.Thread(target=self._read, args=(process, errors), name="qcut-builder", daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[bytes], errors: int) -> None:
        """Take the process's results until there are no more jobs, or it dies."""
        output = io.BufferedReader(process.stdout)  # type: ignore[type-var]
        idle, reason = False, ""
        while not idle and not reason:
            try:
                idle = self._settle(*pickle.load(output))
            except (EOFError, OSError, pickle.UnpicklingError):
                reason = "its process ended"
            except Exception as error:  # callers must not wait for a thread that has ended
                reason = f"{type(error).__name__}: {error}"
        assert process.stdin is not None
        process.stdin.close()  # which ends it
        status = process.wait()
        output.close()
        with os.fdopen(errors, "rb") as file:
            file.seek(0)
            text = file.read().decode(errors="replace").strip()
        if reason:
            self._lost(process, f"{reason} (status {status})", text)

    def _settle(self, key: str, done: bool, result: Any) -> bool:
        """Take a job's result, let results take over if it is time, and go on with the next job.

        Returns:
            Whether there is none, so that the process ends.
        """
        job = self._running[key]
        if done:
            job.keep(result)
        with self._lock:
            if done:
                self._since = self._since if self._finished else time.monotonic()
                self._finished.append(key)
            else:
                self._failed.add(key)
            ready: list[str] = []
            last = len(self._running) == 1 and not self._waiting
            if last or (self._finished and time.monotonic() - self._since >= HANDOVER_S):
                ready, self._finished = self._finished, []
            is_awaited = not self._awaited.isdisjoint(ready)
            self._awaited.difference_update(ready)
        if not done:
            _warn(job.name, result)
        if is_awaited:
            for listener in self._listeners:
                listener()
        with self._lock:
            del self._running[key]
            self._feed()
            if idle := not self._running:
                self._process = None
        with self._changed:
            self._changed.notify_all()
        return idle

    def _lost(self, process: subprocess.Popen[bytes], reason: str, text: str) -> None:
        """Give up the jobs of a process that died, and go on with the others."""
        _warn(", ".join(job.name for job in self._running.values()), f"{reason}\n{text}".strip())
        with self._lock:
            self._failed.update(self._running)
            self._running = {}
            if self._process is process:
                self._process = None
            self._feed()
        with self._changed:
            self._changed.notify_all()

    def _in_child(self) -> None:
        """In a forked child: the jobs and their process are the parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._waiting, self._running, self._finished, self._awaited = [], {}, [], set()
        process, self._process = self._process, None
        if process is not None:  # its input has to end with the parent
            process.returncode = 0
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(message)
    while rest:
        rest = rest[process.stdin.write(rest) :]


def _warn(name: str, problem: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # as an error it would end the thread unseen
        warnings.warn(
            f"qcut: {name} cannot be built in the background, and slower code with the same results goes on in its "
            f"place: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )


def background_jobs() -> int:
    """Builds at a time in the background: half the cores, fewer if memory is short."""
    return max(1, default_jobs() // 2)


builder = Builder()
"""Does this process's jobs."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: builder._in_child())
