"""What generation returns, and each sequence's way there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qcut.numerics.sampling import Ban, Sampling
from qcut.text.sequence_text import Transcript

Reason = Literal["stop", "length", "context", "cancelled"]
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
class Generated:
    """The continuation of a prompt.

    Attributes:
        tokens: ids of the new tokens, a stop token included, or the token that completed a stop string.
        reason: why generation ended: ``stop`` at a stop token or string, ``length`` at ``max_new_tokens``, ``context``
            where the context was full, ``cancelled`` where its sender ended it.
        text: the new tokens' text, without special tokens, without a stop token and without a stop string and what
            follows it; None where the engine has no tokenizer.
        log_probabilities: of each token, where they were asked for; else None.
    """

    tokens: list[int] = field(default_factory=list)
    reason: Reason = "length"
    text: str | None = None
    log_probabilities: list[LogProbability] | None = None


@dataclass(frozen=True)
class Event:
    """A token of one sequence, as it comes, or an end without one.

    Attributes:
        sequence: index of the prompt that is continued, or of the sample of a request's prompt.
        token: id of the new token; None where the sequence has been cancelled, or has failed with its scheduler.
        text: text that is certain with this token, often none: half a character waits for the other half, and the
            beginning of a stop string for its end. All texts of a sequence are `Generated.text`. None where the engine
            has no tokenizer.
        reason: why the sequence ends with this token, as in `Generated`, or ``failed``; None while it goes on.
        log_probability: of the token, where a request asked for it.
    """

    sequence: int
    token: int | None
    text: str | None
    reason: End | None
    log_probability: LogProbability | None = None


class Running:
    """A sequence that is being continued.

    Args:
        length: tokens of the prompt.
        context: tokens that the cache has room for. The last new token is not read and needs no room.
        max_new_tokens: most new tokens, or None.
        stops: ids that end the sequence.
        transcript: the sequence's text; None without a tokenizer.
        sampling: how tokens are chosen.
        bans: tokens that are not chosen.
        least: new tokens before which no string ends the sequence.

    Attributes:
        tokens: ids of the new tokens.
        log_probabilities: of the new tokens, where somebody gives them.
        reason: why the sequence ended; None while it goes on.
        most: most new tokens, by ``max_new_tokens`` and the context.
        sampling: as given.
        bans: as given.
    """

    def __init__(
        self,
        length: int,
        context: int,
        max_new_tokens: int | None,
        stops: frozenset[int],
        transcript: Transcript | None = None,
        *,
        sampling: Sampling | None = None,
        bans: tuple[Ban, ...] = (),
        least: int = 0,
    ) -> None:
        self.tokens: list[int] = []
        self.log_probabilities: list[LogProbability] | None = None
        self.reason: Reason | None = None
        self.sampling, self.bans = sampling or Sampling(), bans
        self._prompt_length, self._stops, self._transcript, self._least = length, stops, transcript, least
        room = context - length + 1
        self.most = room if max_new_tokens is None else min(room, max_new_tokens)
        self._end: Reason = "length" if self.most == max_new_tokens else "context"

    @property
    def length(self) -> int:
        """Tokens that have been read."""
        return self._prompt_length + max(0, len(self.tokens) - 1)

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token is the likeliest by the model's own logits."""
        sampling = self.sampling
        return sampling.greedy and not (sampling.penalizes or sampling.logit_bias or self.bans)

    @property
    def may_want_two(self) -> bool:
        """Whether there may be a token after the next."""
        return self.reason is None and len(self.tokens) + 1 < self.most

    @property
    def result(self) -> Generated:
        """What has been generated."""
        text = None if self._transcript is None else self._transcript.text
        return Generated(self.tokens, self.reason or "length", text, self.log_probabilities)

    def end(self) -> None:
        """End a sequence that has no room for a token."""
        self.reason = self._end

    def cancel(self) -> str | None:
        """End the sequence; returns the text held back."""
        self.reason = "cancelled"
        return None if self._transcript is None else self._transcript.rest()

    def take(self, token: int, found: LogProbability | None = None) -> str | None:
        """Append a token, which may be the last, and return the text that is certain with it."""
        self.tokens.append(token)
        if found is not None:
            self.log_probabilities = self.log_probabilities or []
            self.log_probabilities.append(found)
        if token in self._stops:
            self.reason = "stop"
        elif len(self.tokens) == self.most:
            self.reason = self._end
        if self._transcript is None:
            return None
        piece = "" if self.reason == "stop" else self._transcript.add(token, len(self.tokens) >= self._least)
        if self.reason is not None:
            piece += self._transcript.rest()
        if self._transcript.stopped:
            self.reason = "stop"
        return piece
