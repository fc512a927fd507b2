"""A request to continue a prompt, as its sender holds it: what comes, and the way to end it."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from typing import Any

from qcut.common.failures import is_interrupt
from qcut.engine.likelihoods import LogProbability
from qcut.engine.sequence import End, Event, Generated, SequenceState
from qcut.errors import QcutError

_log = logging.getLogger("qcut")

Listener = Callable[[Event], object]


class Request(SequenceState):
    """A prompt that is being continued by a scheduler.

    Iterating gives the new tokens as they come, in any thread except the scheduler's; with a listener there is nothing
    to iterate over.

    Args:
        arguments: of `SequenceState`, of the prompt on.
        prompt_top: how many of the likeliest tokens are listed with each token of the prompt; None: none is scored.
        listener: called with each event, in place of the queue.
        options: of `SequenceState`.

    Attributes:
        reason: why the sequence has ended, once that has been delivered; None before.
        found: tokens of the prompt that the cache of beginnings had.
        prompt_log_probabilities: of the prompt's tokens from the second on, where they were asked for, once the prompt
            has been read, which is before the first event; else None.
        error: what the request has failed with.
        is_cancelled: whether the sender has ended it.
    """

    def __init__(self, *arguments: Any, prompt_top: int | None, listener: Listener | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prompt_top = prompt_top
        self.reason: End | None = None
        self.found = 0
        self.prompt_log_probabilities: list[LogProbability] | None = None
        self.error: QcutError | None = None
        self.is_cancelled = False
        self._listener = listener
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def cancel(self) -> None:
        """End the sequence before its next token; nothing where it has ended. May be called in any thread."""
        self.is_cancelled = True

    def events(self) -> Iterator[Event]:
        """What comes, up to and with the end, once.

        Raises:
            QcutError: what the request has failed with.
        """
        while True:
            event = self._events.get()
            yield event
            if event.reason is not None:
                if self.error is not None:
                    raise self.error
                return

    def __iter__(self) -> Iterator[int]:
        """New tokens as they come."""
        return (event.token for event in self.events() if event.token is not None)

    def result(self) -> Generated:
        """Wait for the end. Tokens of a cancelled request are those that came before.

        Raises:
            QcutError: what the request has failed with.
        """
        for _ in self.events():
            pass
        return self.generated

    def deliver(self, event: Event) -> None:
        """Pass an event on; the scheduler does."""
        self.reason = event.reason
        if self._listener is None:
            self._events.put(event)
            return
        try:
            self._listener(event)
        except BaseException as error:  # the others go on
            if is_interrupt(error):
                raise
            _log.exception("a request's listener has failed; the request is cancelled")
            self.cancel()

    def deliver_cancelled(self) -> None:
        """End the sequence, and tell its sender."""
        self.deliver(Event(self.index, None, self.finish_cancelled(), "cancelled"))

    def fail(self, error: QcutError) -> None:
        """Tell the sender what the sequence has failed with, unless its end has been delivered."""
        if self.reason is None:
            self.error = error
            self.deliver(Event(self.index, None, None, "failed"))
