"""Writes that fail: processes killed at every step of a write, and full disks of several kinds."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WRITES = ("fsync", "replace", "open", "mkdir")
"""Functions of ``os`` that a write goes through."""


@contextlib.contextmanager
def failing_at(step: int, function: str, number: int = errno.ENOSPC) -> Iterator[list[int]]:
    """Let the calls of a function of ``os`` from the given one on fail; yields a list with an entry for each call."""
    real = getattr(os, function)
    calls: list[int] = []

    def fail(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > step:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, function, fail)
        yield calls


def every_failure(act: Callable[[], object], error: tuple[type[Exception], ...], check: Callable[[], object]) -> None:
    """Let each call of each function in turn, and all after it, fail: ``act`` raises ``error``, or had not to write.

    Args:
        act: writes something.
        error: what it has to raise.
        check: is called after each failure.
    """
    for function in WRITES:
        for step in range(1000):
            with failing_at(step, function) as calls:
                with contextlib.suppress(*error):
                    act()
                ended = len(calls) <= step
            check()
            if ended:
                break


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes beyond a size fail in this process, as on a disk that fills up in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A tmpfs on a folder; skips the test where this process may not mount."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


STEPS = ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "write")
"""Functions of ``os`` with calls that are steps. `open` stands for `os.open`; files of Python reach the disk by
`fsync`."""


def deaths(act: Callable[[], object]) -> Iterator[int]:
    """Run a function in forked children: child i is killed before step i of its writes.

    Yields:
        The step, after each death. Ends when a child has finished without dying.
    """
    step = 0
    while True:
        child = os.fork()
        if child == 0:
            _die_at(step, act)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the child failed at step {step}"
            assert step > 3, "the child had hardly a step to die at"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        yield step
        step += 1


def _die_at(step: int, act: Callable[[], object]) -> None:
    left = [step]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    try:
        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        act()
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os._exit(1)
    os._exit(0)
