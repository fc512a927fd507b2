"""A request to continue a prompt, as its sender holds it: what comes, and the way to end it."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

from qcut.engine.generated import Generated, Reason
from qcut.numerics.sampling import Sampling

_log = logging.getLogger("qcut")

End = Reason | Literal["failed"]


@dataclass(frozen=True)
class LogProbability:
    """Of a token by the model, before temperature and penalties.

    Attributes:
        chosen: of the token.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """A new token, or the end.

    Attributes:
        token: id of the new token; None at the end.
        reason: why the sequence has ended: as `qcut.Generated.reason`, or ``failed`` with the scheduler; None while it
            goes on.
        log_probability: of the token, where it was asked for.
    """

    token: int | None = None
    reason: End | None = None
    log_probability: LogProbability | None = None


Listener = Callable[[Event], object]


class Request:
    """A prompt that is being continued.

    Iterating gives the new tokens as they come, in any thread but the scheduler's; with a listener there is nothing to
    iterate over.

    Attributes:
        prompt: its ids.
        tokens: ids of the new tokens so far.
        reason: why the sequence has ended; None while it goes on.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        top: int | None,
        stops: frozenset[int],
        listener: Listener | None,
    ) -> None:
        self.prompt, self.sampling, self.top, self.stops = prompt, sampling, top, stops
        self.tokens: list[int] = []
        self.reason: End | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False
        self._listener = listener
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def cancel(self) -> None:
        """End the sequence before its next token; nothing where it has ended. May be called in any thread."""
        self.is_cancelled = True

    def events(self) -> Iterator[Event]:
        """What comes, up to and with the end, once.

        Raises:
            Exception: that of the scheduler, where it has failed.
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
            Exception: that of the scheduler, where it has failed.
        """
        reason: End | None = None
        for event in self.events():
            reason = event.reason
        return Generated(list(self.tokens), cast(Reason, reason))

    def tell(self, event: Event) -> None:
        """Pass an event on; the scheduler does."""
        if event.token is not None:
            self.tokens.append(event.token)
        if event.reason is not None:
            self.reason = event.reason
        if self._listener is None:
            self._events.put(event)
            return
        try:
            self._listener(event)
        except Exception:  # the others go on
            _log.exception("a request's listener has failed; the request is cancelled")
            self.cancel()
