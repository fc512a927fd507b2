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
from qcut.server.structured import Asked
from qcut.server.tools.choice import Parsing
from qcut.server.tools.pieces import Parser, Piece, joined

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
        kept: special tokens that texts keep, by their spelling.
        prompt_end: the end of the prompt's text, set before the first token is passed on.
    """

    END = b"data: [DONE]\n\n"

    def __init__(self, name: str, kind: str, chunk: str, prefix: str) -> None:
        self._kind, self._chunk = kind, chunk
        self.kept: tuple[str, ...] = ()
        self.prompt_end = ""
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"qcut-{__version__}",
        }

    def asked(self, asked: Asked | None) -> Asked | None:
        """The constraint of the answers, from the one that the request asks for; `prompt_end` has been set."""
        return asked

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


class ParsedForm(Form):
    """A response format that has calls and reasoning apart from content.

    Args:
        name: see `Form`.
        kind: see `Form`.
        chunk: see `Form`.
        prefix: see `Form`.
        parsing: how calls and reasoning are found in texts; None: all text is content.
    """

    def __init__(self, name: str, kind: str, chunk: str, prefix: str, parsing: Parsing | None) -> None:
        super().__init__(name, kind, chunk, prefix)
        self._parsing = parsing
        self.kept = () if parsing is None else parsing.markers
        self._parsers: dict[int, tuple[Parser, CallParts]] = {}

    def asked(self, asked: Asked | None) -> Asked | None:
        """See `Form`."""
        return asked if self._parsing is None else self._parsing.asked(self.prompt_end, asked)

    def _parsed(self, index: int, text: str, is_last: bool) -> tuple[list[Piece], CallParts]:
        """The pieces of a choice's next text, and its calls."""
        assert self._parsing is not None
        if index not in self._parsers:
            self._parsers[index] = self._parsing.parser(self.prompt_end), CallParts(self._parsing)
        parser, calls = self._parsers[index]
        return joined([*parser.add(text), *(parser.end() if is_last else ())]), calls


class ChatCompletion(ParsedForm):
    """Answers of ``/v1/chat/completions``.

    Args:
        name: see `Form`.
        parsing: see `ParsedForm`.
    """

    def __init__(self, name: str, parsing: Parsing | None = None) -> None:
        super().__init__(name, "chat.completion", "chat.completion.chunk", "chatcmpl", parsing)

    def begin(self, index: int, before: str) -> list[JSON]:
        """See `Form`."""
        delta = {"role": "assistant", "content": ""}
        return [self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        message: JSON = {"role": "assistant", "content": text, "refusal": None}
        if self._parsing is not None:
            pieces, calls = self._parsed(index, text, True)
            found = [call for piece in pieces if (call := calls.take(piece)) is not None]
            reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
            content = "".join(piece.text for piece in pieces if piece.kind == "content")
            message["content"] = content or (None if found or reasoning else "")
            if reasoning:
                message["reasoning_content"] = reasoning
            if found:
                message["tool_calls"] = _whole(found)
            reason = calls.reason(reason)
        return {"index": index, "message": message, "logprobs": _content(scored), "finish_reason": reason}

    def part(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`."""
        return self._choice(index, {"content": text} if text or reason is None else {}, scored, reason)

    def chunks(self, index: int, text: str, scored: Scored | None, reason: str | None, more: JSON) -> list[JSON]:
        """See `Form`: a chunk for each piece of the text; the last one has ``more`` and the reason."""
        if self._parsing is None:
            return super().chunks(index, text, scored, reason, more)
        pieces, calls = self._parsed(index, text, reason is not None)
        deltas = [delta for piece in pieces if (delta := _delta(piece, calls)) is not None]
        reason = calls.reason(reason)
        if not deltas or reason is not None:
            is_empty = reason is None and not more and (scored is None or not scored.rows)
            deltas += [] if is_empty else [{}]
        chunks = [self._choice(index, delta, None, None) for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = _content(scored)
            chunks[-1] |= {"finish_reason": reason, **more}
        return [self.chunk([chunk]) for chunk in chunks]

    def _choice(self, index: int, delta: JSON, scored: Scored | None, reason: str | None) -> JSON:
        return {"index": index, "delta": delta, "logprobs": _content(scored), "finish_reason": reason}


class CallParts:
    """The calls of a choice so far."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing, self._count = parsing, 0

    def take(self, piece: Piece) -> JSON | None:
        """A part of a call in the form of a delta; None for other pieces, and for calls beyond those allowed."""
        if piece.kind not in ("call", "arguments"):
            return None
        self._count += piece.kind == "call"
        if self._count > 1 and not self._parsing.several:
            return None
        index = {"index": self._count - 1}
        if piece.kind == "arguments":
            return {**index, "function": {"arguments": piece.text}}
        function = {"name": piece.text, "arguments": ""}
        return {**index, "id": self._parsing.new_id(), "type": "function", "function": function}

    def reason(self, reason: str | None) -> str | None:
        """The reason of an end; a stop after calls has its own."""
        return "tool_calls" if self._count and reason == "stop" else reason


def _delta(piece: Piece, calls: CallParts) -> JSON | None:
    if piece.kind in ("content", "reasoning"):
        return {"content" if piece.kind == "content" else "reasoning_content": piece.text}
    call = calls.take(piece)
    return None if call is None else {"tool_calls": [call]}


def _whole(parts: list[JSON]) -> list[JSON]:
    """Calls from their parts."""
    found: list[JSON] = []
    for part in parts:
        if "id" in part:
            found.append({name: value for name, value in part.items() if name != "index"})
        else:
            found[-1]["function"]["arguments"] += part["function"]["arguments"]
    return found


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
