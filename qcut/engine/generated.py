"""What generation returns, and each sequence's way there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Reason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True)
class Generated:
    """The continuation of a prompt.

    Attributes:
        tokens: ids of the new tokens, a stop token included.
        reason: why generation ended: ``stop`` at a stop token, ``length`` at ``max_new_tokens``, ``context`` where the
            context was full, ``cancelled`` where its sender ended it.
    """

    tokens: list[int] = field(default_factory=list)
    reason: Reason = "length"


class Running:
    """A sequence that is being continued.

    Args:
        length: tokens of the prompt.
        context: tokens that the cache has room for. The last new token is not read and needs no room.
        max_new_tokens: most new tokens, or None.
        stops: ids that end the sequence.

    Attributes:
        tokens: ids of the new tokens.
        reason: why the sequence ended; None while it goes on.
    """

    def __init__(self, length: int, context: int, max_new_tokens: int | None, stops: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self._prompt_length, self._stops = length, stops
        room = context - length + 1
        self._most = room if max_new_tokens is None else min(room, max_new_tokens)
        self._end: Reason = "length" if self._most == max_new_tokens else "context"

    @property
    def length(self) -> int:
        """Tokens that have been read."""
        return self._prompt_length + max(0, len(self.tokens) - 1)

    @property
    def may_want_two(self) -> bool:
        """Whether there may be a token after the next."""
        return self.reason is None and len(self.tokens) + 1 < self._most

    def take(self, token: int) -> None:
        """Append a token, which may be the last."""
        self.tokens.append(token)
        if token in self._stops:
            self.reason = "stop"
        elif len(self.tokens) == self._most:
            self.reason = self._end
