"""Processes that die at every step of what they write."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

STEPS = ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "write")
"""Functions of ``os`` whose calls are steps. `open` stands for `os.open`; files of Python reach the disk by `fsync`."""


def deaths(act: Callable[[], object]) -> Iterator[int]:
    """Run a function in forked children, of which the first dies before its first step, the next before the second …

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
