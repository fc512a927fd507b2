"""`Request`: a sequence of a scheduler, its events, and its cancellation."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qcut.common.failures import is_interrupt
from qcut.engine.likelihoods import LogProbability
from qcut.engine.sequence import End, Event, Generated, SequenceState
from qcut.errors import ConfigError, QcutError, RequestError

_log = logging.getLogger("qcut")

Listener = Callable[[Event], object]


def as_failure(error: BaseException) -> QcutError:
    """A failure as the error of a request. Panics of tokenizers and exits of listeners are no `Exception`."""
    # Frames of the failure would keep their tensors alive as long as the request, and memory may be what is short.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, QcutError):
        return error
    failure = RequestError(f"the request has failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Iteration:
    """The iteration of a scheduler that runs, if one does: one at a time, in one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextmanager
    def begun(self, *, waits: bool) -> Iterator[None]:
        """Begin one, and end it with the block.

        Args:
            waits: whether to wait for the end of another thread's.

        Raises:
            ConfigError: one runs, in another thread or around this listener.
        """
        if self.is_here or not self._lock.acquire(blocking=waits):
            raise ConfigError("step: the scheduler is in a step already; allowed: one thread, and no listener")
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()

    @property
    def is_here(self) -> bool:
        """Whether it runs in this thread, which is then a listener's."""
        return self._thread == threading.get_ident()


class Request(SequenceState):
    """A prompt that is being continued by a scheduler.

    Iterating gives the new tokens as they come, in any thread; with a listener there is nothing to iterate over. Wait
    in listeners only for requests that have ended: the scheduler computes nothing meanwhile.

    Args:
        arguments: of `SequenceState`, of the prompt on.
        prompt_top: how many of the likeliest tokens are listed with each token of the prompt; None: none is scored.
        listener: called with each event, in place of the queue.
        iteration: of the scheduler.
        options: of `SequenceState`.

    Attributes:
        prompt: its ids.
        tokens: ids of the new tokens so far.
        reason: why the sequence has ended, once that has been delivered; None before.
        reused_tokens: prompt tokens with keys and values from the prefix cache.
        prompt_log_probabilities: of the prompt's tokens from the second on, if asked for, once the prompt has been
            prefilled, which is before the first event; else None.
        error: the request's failure, or None.
        is_cancelled: whether `cancel` was called.
    """

    def __init__(
        self,
        *arguments: Any,
        prompt_top: int | None,
        listener: Listener | None,
        iteration: Iteration,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.prompt_top = prompt_top
        self.reason: End | None = None
        self.reused_tokens = 0
        self.prompt_log_probabilities: list[LogProbability] | None = None
        self.error: QcutError | None = None
        self.is_cancelled = False
        self._listener, self._iteration = listener, iteration
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end has been delivered

    def cancel(self) -> None:
        """End the sequence before its next token; nothing if it has ended. May be called in any thread."""
        self.is_cancelled = True

    def events(self) -> Iterator[Event]:
        """Events up to and including the end, each of them once: later iterations wait for the end and give nothing.

        Raises:
            QcutError: the request's `error`.
            ConfigError: a listener waits for the scheduler that waits for the listener.
        """
        while (event := self._next_event()) is not None:
            yield event
        self._events.put(None)  # for others that wait
        if self.error is not None:
            raise self.error

    def _next_event(self) -> Event | None:
        try:
            return self._events.get(block=not self._iteration.is_here)
        except queue.Empty:
            raise ConfigError("a listener waits for a request; allowed: for one that has ended") from None

    def __iter__(self) -> Iterator[int]:
        """New tokens as they come."""
        return (event.token for event in self.events() if event.token is not None)

    def result(self) -> Generated:
        """Wait for the end. Tokens of a cancelled request are those that came before.

        Raises:
            QcutError: the request's `error`.
        """
        for _ in self.events():
            pass
        return self.generated

    def deliver(self, event: Event) -> None:
        """Called by the scheduler with each event."""
        self.reason = event.reason
        try:
            (self._events.put if self._listener is None else self._listener)(event)
        except BaseException as error:  # the others go on
            if is_interrupt(error):
                raise
            _log.exception("a request's listener has failed; the request is cancelled")
            self.cancel()
        finally:
            if event.reason is not None:
                self._events.put(None)

    def deliver_cancelled(self) -> None:
        """End a cancelled sequence."""
        self.deliver(Event(self.index, None, self.finish_cancelled(), "cancelled"))

    def fail(self, error: QcutError) -> None:
        """End the sequence with an error, unless its end has been delivered."""
        if self.reason is None:
            self.error = error
            self.deliver(Event(self.index, None, None, "failed"))
