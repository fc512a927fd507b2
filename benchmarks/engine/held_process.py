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
from typing import Any

_POLL_S = 0.2


def wait_for_turn() -> None:
    """In the process: return when `HeldProcess.results` is called."""
    sys.stdin.readline()


class HeldProcess:
    """A process, started. Of what it prints, the lines that begin with a brace are JSON; the first says it is ready.

    Args:
        command: that it runs.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.started = time.monotonic()
        self.out, self.err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115  (closed by `stop`)
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=self.out, stderr=self.err, text=True, start_new_session=True
        )

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
            self.process.communicate("\n", timeout=max(0.0, self.started + timeout - time.monotonic()))
        self._kill()
        if self.process.returncode:
            printed, errors = (self._read(file) for file in (self.out, self.err))
            raise RuntimeError(f"status {self.process.returncode} in {timeout:g} s: {printed[-1000:]}{errors[-3000:]}")
        return self._lines()

    def stop(self) -> None:
        """End the process and those that it has started, and forget what it has printed."""
        self._kill()
        self.out.close()
        self.err.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it has started holds the GPU, too
        self.process.wait()

    def _lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in self._read(self.out).splitlines(True) if line[:1] == "{" and line[-1] == "\n"
        ]

    @staticmethod
    def _read(file: Any) -> str:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, 0).decode(errors="replace")
