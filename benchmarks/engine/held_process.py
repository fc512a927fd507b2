"""A process that gets ready, says so, and waits with its work until it may go on.

Several that take minutes to start do so at the same time, and are timed one after another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_S = 0.2


def wait_for_turn() -> None:
    """In the process: return when `HeldProcess.results` is called."""
    sys.stdin.readline()


class HeldProcess:
    """A process, started; a context manager that ends it, and all that it has started.

    Of what it prints, the lines that begin with a brace are JSON; the first says it is ready.

    Args:
        command: that it runs.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.started = time.monotonic()
        self.out, self.err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115  (closed at the exit)
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=self.out, stderr=self.err, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.out.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it has started holds the GPU, too
        self.process.wait()
        self.out.close()
        self.err.close()

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the process is ready or has ended, or ``timeout`` seconds after its start."""
        while self.process.poll() is None and not self._lines() and time.monotonic() < self.started + timeout:
            time.sleep(_POLL_S)

    def results(self, timeout: float) -> list[dict[str, Any]]:
        """Let the process go on; what it has printed when it ends.

        Raises:
            RuntimeError: it failed, or runs ``timeout`` seconds after its start; the message has the end of its output.
        """
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self.process.communicate(b"\n", timeout=max(0.0, self.started + timeout - time.monotonic()))
        if (status := self.process.poll()) != 0:
            ended = f"no end in {timeout:g} s" if status is None else f"status {status}"
            raise RuntimeError(f"{ended}: {_read(self.out)[-1000:]}{_read(self.err)[-3000:]}")
        return self._lines()

    def _lines(self) -> list[dict[str, Any]]:
        lines = _read(self.out).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def _read(file: IO[bytes]) -> str:
    """All of a file, without a seek: the process writes where the file's position is."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
