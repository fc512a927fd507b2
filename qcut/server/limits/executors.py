"""Threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 32768
"""Bytes from which a request is large."""
_SMALL, _LARGE, _CONSTRAINED = 2, 2, 2


class Executors:
    """Thread pools by work of requests: others wait neither for large ones nor for constraints that are checked."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_SMALL, "qcut-small")
        self._large = ThreadPoolExecutor(_LARGE, "qcut-large")
        self._constrained = ThreadPoolExecutor(_CONSTRAINED, "qcut-constrained")

    def prepare(self, function: Callable[[], object]) -> None:
        """Start a function in each thread for small requests without waiting; exceptions are ignored."""
        for _ in range(_SMALL):
            self._small.submit(function)

    async def run(self, size: int, function: Callable[[], T], *, constrains: bool = False) -> T:
        """Run a function in a thread.

        Args:
            size: bytes of the request.
            function: called without arguments.
            constrains: whether it checks a constraint, which takes seconds of CPU time if that is hostile.

        Raises:
            RuntimeError: ``function`` raised no `Exception`: a panic or ``SystemExit``, which would end the event loop.
            Exception: raised by ``function``.
        """

        def contained() -> T:
            try:
                return function()
            except Exception:
                raise
            except BaseException as error:
                raise RuntimeError(f"{type(error).__name__}: {error}"[:300]) from error

        executor = self._large if size >= LARGE_BYTES else self._small
        executor = self._constrained if constrains else executor
        return await asyncio.get_running_loop().run_in_executor(executor, contained)
