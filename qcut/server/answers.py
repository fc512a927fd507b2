"""Answers in OpenAI's form: whole, and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from qcut import __version__
from qcut.engine.request import Request
from qcut.engine.sequence import Event
from qcut.server.logprobs import Scored, columns, lines
from qcut.server.refusals import Refusal

JSON = dict[str, Any]
_REASONS = {"stop": "stop", "length": "length", "context": "length"}


class Form:
    """The form of one kind of answers.

    Args:
        name: under which the model is served.
        kind: ``object`` of a whole answer.
        piece: ``object`` of a piece.
        prefix: of ids.

    Attributes:
        END: what a stream ends with.
    """

    END = b"data: [DONE]\n\n"

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

    def begin(self, index: int, before: str) -> list[JSON]:
        """What a stream begins with, for each choice; ``before`` is the text before the first token."""
        raise NotImplementedError

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """A choice of a whole answer."""
        raise NotImplementedError

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """A part of a choice."""
        raise NotImplementedError

    def pieces(self, index: int, text: str, scored: Scored | None, reason: str | None, more: JSON) -> list[JSON]:
        """What a stream has for a part of a choice; ``more`` are fields of vLLM's interface."""
        return [self.piece([{**self.part(index, text, scored, reason), **more}])]

    def end(self, usage: JSON) -> list[JSON]:
        """What a stream has after its choices, whether or not usage is asked for."""
        return []

    def counted(self, usage: JSON) -> list[JSON]:
        """What a stream has at last where usage is asked for."""
        return [{**self.piece([]), "usage": usage}]

    def failed(self, refusal: Refusal) -> list[JSON]:
        """What a stream ends with that goes on no more."""
        return [refusal.body]


class Completion(Form):
    """Answers of ``/v1/completions``."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "text_completion", "text_completion", "cmpl")

    def begin(self, index: int, before: str) -> list[JSON]:
        """See `Form`."""
        return [self.piece([self.part(index, before, None, None)])] if before else []

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        return {"index": index, "text": text, "logprobs": columns(scored), "finish_reason": reason}

    part = choice


class ChatCompletion(Form):
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "chat.completion", "chat.completion.chunk", "chatcmpl")

    def begin(self, index: int, before: str) -> list[JSON]:
        """See `Form`."""
        delta = {"role": "assistant", "content": ""}
        return [self.piece([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _content(scored), "finish_reason": reason}

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        delta = {"content": text} if text or reason is None else {}
        return {"index": index, "delta": delta, "logprobs": _content(scored), "finish_reason": reason}


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


def _content(scored: Scored | None) -> JSON | None:
    """Log-probabilities in the form of chats."""
    return None if scored is None else {"content": lines(scored), "refusal": None}
