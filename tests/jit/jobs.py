"""What tests have done in the background: functions that another process can import."""

from __future__ import annotations

import os
import time
from pathlib import Path

from qcut.errors import BuildError
from qcut.jit.compilers import run_all
from qcut.jit.scratch import scratch_folder


def facts(value: object) -> tuple[object, int, int, int]:
    """The value, and of the process that computes this: its number, niceness and session."""
    return value, os.getpid(), os.nice(0), os.getsid(0)


def note(path: str, line: str, seconds: float = 0.0) -> None:
    """Append a line to a file, and take some time."""
    with Path(path).open("a") as file:
        file.write(line + "\n")
    time.sleep(seconds)


def refuse(reason: str) -> None:
    """Fail as a compiler does."""
    raise BuildError("nvcc ended with 1", kernel="x", log=reason)


def stumble() -> None:
    """Fail as nothing should."""
    raise ZeroDivisionError("of no kind that is foreseen")


def die(status: int) -> None:
    """End the process."""
    os.write(2, b"last words\n")
    os._exit(status)


def compile_for(seconds: int, report: str) -> None:
    """Run something that takes as long as a compiler; its process, then its folder, are written to a file."""
    with scratch_folder() as folder:
        script = f'echo "$$ $PWD" > {report}.new; mv {report}.new {report}; sleep {seconds}'
        run_all([["sh", "-c", script]], folder)
