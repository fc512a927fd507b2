"""Answers in OpenAI's form: whole, and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qcut import __version__
from qcut.engine.generated import Event, LogProbability
from qcut.engine.request import Request

JSON = dict[str, Any]
_UNKNOWN = "\ufffd"
_REASONS = {"stop": "stop", "length": "length", "context": "length"}


class Tokenizer(Protocol):
    """As far as answers need it."""

    def decode(self, token_ids: list[int], /) -> str:
        """The text of ids."""


@dataclass
class Scored:
    """The log-probabilities of a choice's tokens so far.

    Attributes:
        tokens: texts of the tokens.
        offsets: characters of the tokens before each.
        found: of each token.
    """

    tokenizer: Tokenizer
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    found: list[LogProbability] = field(default_factory=list)
    _end: int = 0

    def add(self, token: int, found: LogProbability) -> None:
        """Take a token."""
        self.tokens.append(self.text(token))
        self.offsets.append(self._end)
        self.found.append(found)
        self._end += len(self.tokens[-1])

    def text(self, token: int) -> str:
        """The text of one token by itself."""
        return self.tokenizer.decode([token])

    def take(self) -> Scored:
        """What has come since the last call."""
        taken = Scored(self.tokenizer, self.tokens, self.offsets, self.found)
        self.tokens, self.offsets, self.found = [], [], []
        return taken


class Form:
    """The form of one kind of answers.

    Args:
        name: under which the model is served.
        kind: ``object`` of a whole answer.
        piece: ``object`` of a piece.
        prefix: of ids.
    """

    def __init__(self, name: str, kind: str, piece: str, prefix: str) -> None:
        self._kind, self._piece = kind, piece
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"qcut-{__version__}",
        }

    def whole(self, choices: list[JSON], usage: JSON) -> JSON:
        """A whole answer."""
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def piece(self, choices: list[JSON]) -> JSON:
        """A piece of an answer."""
        return {**self._head, "object": self._piece, "choices": choices}

    def first(self, index: int, before: str) -> JSON | None:
        """The choice with which a stream begins; None: there is nothing to say before the first text."""
        raise NotImplementedError

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """A choice of a whole answer."""
        raise NotImplementedError

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """A part of a choice."""
        raise NotImplementedError


class Completion(Form):
    """Answers of ``/v1/completions``."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "text_completion", "text_completion", "cmpl")

    def first(self, index: int, before: str) -> JSON | None:
        """See `Form`."""
        return self.part(index, before, None, None) if before else None

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        return {"index": index, "text": text, "logprobs": _columns(scored), "finish_reason": reason}

    part = choice


class ChatCompletion(Form):
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "chat.completion", "chat.completion.chunk", "chatcmpl")

    def first(self, index: int, before: str) -> JSON | None:
        """See `Form`."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _rows(scored), "finish_reason": reason}

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        delta = {"content": text} if text or reason is None else {}
        return {"index": index, "delta": delta, "logprobs": _rows(scored), "finish_reason": reason}


def finish_reason(event: Event) -> str | None:
    """Why a choice ends, as OpenAI says it; None while it goes on, or where it ends without an answer."""
    return None if event.reason is None else _REASONS.get(event.reason)


def usage(requests: Sequence[Request], samples: int) -> JSON:
    """Tokens read and new; a prompt with several samples is read once."""
    prompts = requests[::samples]
    read, new = sum(len(one.prompt) for one in prompts), sum(len(one.tokens) for one in requests)
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.found for one in prompts)},
    }


def _columns(scored: Scored | None) -> JSON | None:
    """Log-probabilities in the form of completions."""
    if scored is None:
        return None
    return {
        "tokens": scored.tokens,
        "token_logprobs": [found.chosen for found in scored.found],
        "top_logprobs": [{scored.text(token): value for token, value in found.top} for found in scored.found],
        "text_offset": scored.offsets,
    }


def _rows(scored: Scored | None) -> JSON | None:
    """Log-probabilities in the form of chats."""
    if scored is None:
        return None
    rows = []
    for text, found in zip(scored.tokens, scored.found, strict=True):
        top = [_scored(scored.text(token), value) for token, value in found.top]
        rows.append({**_scored(text, found.chosen), "top_logprobs": top})
    return {"content": rows, "refusal": None}


def _scored(text: str, value: float) -> JSON:
    """A token with its log-probability. A part of a character has no text that could be made bytes again."""
    return {"token": text, "logprob": value, "bytes": None if _UNKNOWN in text else list(text.encode())}
