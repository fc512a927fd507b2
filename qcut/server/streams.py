"""Events of the scheduler's thread, as an event loop takes them."""

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
"""Seconds without text after which a reader is woken, to say that the stream lives."""


class Bridge:
    """Wakes an event loop from the scheduler's thread: once for all events of a turn, not once for each.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: deque[Stream] = deque()
        self._is_called = False

    def tell(self, stream: Stream) -> None:
        """Wake a stream; in the scheduler's thread."""
        self._told.append(stream)
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop has ended, and nobody listens
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_called = False  # first: what is told from here on calls again
        while self._told:
            self._told.popleft().wake()


class Stream:
    """What comes for one request of HTTP: of all samples of all its prompts.

    Who reads slowly gets several events at a time; the scheduler waits for nobody.

    Args:
        bridge: to the event loop, in which the stream is made.
        samples: of each prompt.

    Attributes:
        requests: those of the scheduler, by choice: prompt by prompt, sample by sample.
        is_left: whether its client has gone.
    """

    def __init__(self, bridge: Bridge, samples: int) -> None:
        self.requests: list[Request] = []
        self.is_left = False
        self._cancelled = threading.Event()  # set by the event loop while another thread submits
        self._bridge, self._samples = bridge, samples
        self._events: deque[tuple[int, Event]] = deque()
        self._woken = asyncio.Event()

    def submit(self, submit: Callable[[int, Listener], list[Request]]) -> None:
        """Submit the next prompt. Where it is refused, those before it are cancelled. Nothing for a cancelled stream.

        Args:
            submit: is given the number of samples and a listener, and returns the requests.

        Raises:
            QcutError: that of ``submit``.
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
        """The client has gone: end all that goes on."""
        self.is_left = True
        self.cancel()

    def cancel(self) -> None:
        """End all that goes on, and what is submitted from here on."""
        self._cancelled.set()
        for request in self.requests:
            request.cancel()

    def wake(self) -> None:
        """Let the reader look; in the event loop."""
        self._woken.set()

    async def events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """What has come, with the index of its choice, until all choices have ended; nothing after `SILENT_S`."""
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
        """Wake the reader now and then."""
        while True:
            await asyncio.sleep(SILENT_S)
            self.wake()

    def _tell(self, first: int, event: Event) -> None:
        self._events.append((first + event.sequence, event))
        self._bridge.tell(self)
