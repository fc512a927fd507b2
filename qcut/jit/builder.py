"""The process that builds in the background: takes jobs from its standard input, and sends results to its output.

It runs at low priority, imports what its jobs need, and ends when its input does: when its parent has no more jobs, or
is no more. Compilers that still run are stopped then, and their scratch folders deleted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from qcut.errors import QcutError

_NICENESS = 10
_GRACE_S = 5.0
"""Seconds that threads have for the deletion of scratch folders, after their compilers were stopped."""


def main() -> None:
    """Serve until the input ends."""
    os.nice(_NICENESS)
    jobs, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # prints do not mix with results
    serve(jobs, results)
    _stop_compilers()
    os._exit(0)


def serve(jobs: IO[bytes], results: IO[bytes]) -> None:
    """Do pickled jobs (key, function, arguments), each in a thread of its own, until the input ends.

    Args:
        jobs: where jobs come from.
        results: takes, for each job, its key, whether it succeeded, and the result or what went wrong.
    """
    lock = threading.Lock()

    def work(key: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            reply = key, True, function(*args)
        except QcutError as error:
            reply = key, False, str(error)
        except BaseException as error:
            reply = key, False, f"{type(error).__name__}: {error}"
        message = pickle.dumps(reply)
        with lock, contextlib.suppress(OSError):  # the parent has ended
            results.write(message)
            results.flush()

    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        threading.Thread(target=work, args=job, name="qcut-work", daemon=True).start()


def _stop_compilers() -> None:
    """Stop all processes of this session until no thread works."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # not ignored, which compilers would inherit
    end = time.monotonic() + _GRACE_S
    while any(thread.name == "qcut-work" for thread in threading.enumerate()) and time.monotonic() < end:
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.05)
