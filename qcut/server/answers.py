"""Responses in OpenAI's formats: complete, or as chunks of a stream."""

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
    """The response format of one endpoint.

    Args:
        name: name of the model in responses.
        kind: ``object`` of a complete response.
        chunk: ``object`` of a chunk.
        prefix: prefix of response ids.

    Attributes:
        END: last bytes of a stream.
    """

    END = b"data: [DONE]\n\n"

    def __init__(self, name: str, kind: str, chunk: str, prefix: str) -> None:
        self._kind, self._chunk = kind, chunk
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"qcut-{__version__}",
        }

    def complete(self, choices: list[JSON], usage: JSON) -> JSON:
        """A complete response."""
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, choices: list[JSON]) -> JSON:
        """A chunk of a stream."""
        return {**self._head, "object": self._chunk, "choices": choices}

    def begin(self, index: int, before: str) -> list[JSON]:
        """First chunks of a stream for a choice; ``before`` is the text before the first token."""
        raise NotImplementedError

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """A choice of a complete response."""
        raise NotImplementedError

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """A choice of a chunk, with the text since the previous chunk."""
        raise NotImplementedError

    def chunks(self, index: int, text: str, scored: Scored | None, reason: str | None, more: JSON) -> list[JSON]:
        """Chunks for new text of a choice; ``more`` holds fields of vLLM's interface."""
        return [self.chunk([{**self.part(index, text, scored, reason), **more}])]

    def end(self, usage: JSON) -> list[JSON]:
        """Chunks after the last choice, with or without ``include_usage``."""
        return []

    def counted(self, usage: JSON) -> list[JSON]:
        """Last chunks of a stream with ``include_usage``."""
        return [{**self.chunk([]), "usage": usage}]

    def failed(self, refusal: Refusal) -> list[JSON]:
        """Chunks that end a stream after an error."""
        return [refusal.body]


class Completion(Form):
    """Answers of ``/v1/completions``."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "text_completion", "text_completion", "cmpl")

    def begin(self, index: int, before: str) -> list[JSON]:
        """See `Form`."""
        return [self.chunk([self.part(index, before, None, None)])] if before else []

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
        return [self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _content(scored), "finish_reason": reason}

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        delta = {"content": text} if text or reason is None else {}
        return {"index": index, "delta": delta, "logprobs": _content(scored), "finish_reason": reason}


def finish_reason(event: Event) -> str | None:
    """OpenAI's ``finish_reason``; None while the choice is running, and if it failed or was cancelled."""
    return None if event.reason is None else _REASONS.get(event.reason)


def usage(requests: Sequence[Request], samples: int) -> JSON:
    """OpenAI's ``usage``; a prompt with several samples counts once."""
    prompts = requests[::samples]
    drafted, accepted = sum(one.drafted_tokens for one in requests), sum(one.accepted_tokens for one in requests)
    read, new = sum(len(one.prompt) for one in prompts), sum(len(one.tokens) for one in requests)
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _content(scored: Scored | None) -> JSON | None:
    """Log-probabilities in the format of chat completions."""
    return None if scored is None else {"content": lines(scored), "refusal": None}
