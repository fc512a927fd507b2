"""Events of the scheduler's thread, delivered to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

from qcut.engine.request import Listener, Request
from qcut.engine.sequence import Event

SILENT_S = 15.0
"""Seconds without events after which a reader is woken to send a keep-alive comment."""


class Bridge:
    """Wakes an event loop from the scheduler's thread, once per scheduler iteration rather than per event.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: deque[Stream] = deque()
        self._is_called = False

    def tell(self, stream: Stream) -> None:
        """Wake a stream. Called in the scheduler's thread."""
        self._told.append(stream)
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_called = False  # first: a call of `tell` from here on schedules another one
        while self._told:
            self._told.popleft().wake()


class Stream:
    """Events of one HTTP request: of all samples of all its prompts.

    A slow reader receives several events at a time; the scheduler never waits for it.

    Args:
        bridge: wakes the event loop of the stream.
        samples: samples per prompt.

    Attributes:
        requests: the scheduler's requests by choice: by prompt, then by sample.
        is_left: whether the client disconnected.
    """

    def __init__(self, bridge: Bridge, samples: int) -> None:
        self.requests: list[Request] = []
        self.is_left = False
        self._cancelled = threading.Event()  # set in the event loop while another thread submits
        self._bridge, self._samples = bridge, samples
        self._events: deque[tuple[int, Event]] = deque()
        self._woken = asyncio.Event()

    def submit(self, submit: Callable[[int, Listener], list[Request]]) -> None:
        """Submit the next prompt, except for a cancelled stream. If ``submit`` raises, earlier prompts are cancelled.

        Args:
            submit: takes the number of samples and a callback, returns the requests.

        Raises:
            QcutError: raised by ``submit``.
        """
        if self._cancelled.is_set():
            return
        try:
            self.requests += submit(self._samples, partial(self._tell, len(self.requests)))
        except BaseException:
            self.cancel()
            raise
        if self._cancelled.is_set():
            self.cancel()

    def leave(self) -> None:
        """Cancel all sequences, since the client disconnected."""
        self.is_left = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel all sequences, including those submitted later."""
        self._cancelled.set()
        for request in self.requests:
            request.cancel()

    def wake(self) -> None:
        """Wake the reader. Called in the event loop."""
        self._woken.set()

    async def events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """New events with the index of their choice, until all choices have ended; an empty list after `SILENT_S`."""
        left = len(self.requests)
        ticker = asyncio.ensure_future(self._tick())
        try:
            while left:
                await self._woken.wait()
                self._woken.clear()
                come = [self._events.popleft() for _ in range(len(self._events))]
                left -= sum(event.reason is not None for _, event in come)
                yield come
        finally:
            ticker.cancel()

    async def _tick(self) -> None:
        """Wake the reader periodically."""
        while True:
            await asyncio.sleep(SILENT_S)
            self.wake()

    def _tell(self, first: int, event: Event) -> None:
        self._events.append((first + event.sequence, event))
        self._bridge.tell(self)
