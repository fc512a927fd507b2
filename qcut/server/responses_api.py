"""``/v1/responses``, OpenAI's newer interface: text only, nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from qcut.engine.likelihoods import MOST_TOP
from qcut.server.answers import JSON, Form
from qcut.server.bodies import AnyPrompt, Body, ChatFields, Message, Schema, without_tools
from qcut.server.known_fields import IGNORED, RESPONSES_ONLY, Only
from qcut.server.logprobs import Scored, lines
from qcut.server.refusals import Refusal

_LOGPROBS = "message.output_text.logprobs"
_Limit = Annotated[int, Field(ge=1, le=(1 << 63) - 1)]
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class TextFormat(Schema):
    """``text``: the form of the answer; see `qcut.server.structured`."""

    WHERE = "text."
    UNSERVED: ClassVar[Mapping[str, Only]] = {
        "verbosity": Only(("medium",), "Say in the input how long the answer shall be"),
    }
    format: dict[str, Any] | None = None


class Reasoning(Schema):
    """``reasoning``."""

    WHERE = "reasoning."
    UNUSED = frozenset({"context", "generate_summary", "summary"})
    effort: str | None = None


class ResponsesBody(ChatFields, Body):
    """Body of ``/v1/responses``."""

    UNSERVED = RESPONSES_ONLY
    UNUSED = IGNORED - {"metadata"}
    PROMPT = "input"
    input: str | Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_output_tokens: _Limit | None = None
    instructions: str | None = None
    include: Annotated[list[str], Field(default_factory=list, fail_fast=True)]
    metadata: Annotated[dict[_Key, _Value], Field(default_factory=dict, max_length=16)]
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] = 0
    text: TextFormat | None = None
    reasoning: Reasoning | None = None

    @classmethod
    def renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """See `Schema`. Checks ``input`` here, to give one error for all of its types."""
        given = without_tools(super().renamed(given))
        if "input" not in given:
            raise Refusal(400, "input: Field required", param="input")
        asked = given["input"]
        if not isinstance(asked, str | list) or asked == []:
            raise Refusal(400, "input: allowed: a text, or a list of messages", param="input")
        for i, item in enumerate(asked if isinstance(asked, list) else ()):
            kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
            if kind not in (None, "message"):
                message = f"input.{i}: found {str(kind)[:80]}; allowed: message. The model reads and writes text only"
                raise Refusal(400, message, param="input", code="unsupported")
        if isinstance(reasoning := given.get("reasoning"), dict) and reasoning.get("effort") is not None:
            given.setdefault("reasoning_effort", reasoning["effort"])
        return given

    def check(self) -> None:
        """See `Body`."""
        super().check()
        if self.n != 1:
            raise Refusal(400, f"n: found {self.n}; allowed: 1. Use /v1/chat/completions", param="n")

    @property
    def formats(self) -> dict[str, dict[str, Any] | None]:
        """See `Body`."""
        return {**super().formats, "text.format": None if self.text is None else self.text.format}

    @property
    def turns(self) -> list[Message]:
        """See `ChatFields`: the instructions and the messages of ``input``."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        asked = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*first, *asked]

    @property
    def prompts(self) -> list[AnyPrompt]:
        """The prompts."""
        return [self.chat]

    @property
    def most(self) -> int | None:
        """Most new tokens; None: up to the context."""
        return self.max_output_tokens

    @property
    def top(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return self.top_logprobs if _LOGPROBS in self.include or self.top_logprobs else None


class Response(Form):
    """Responses of ``/v1/responses``; streams consist of numbered events with a type.

    Args:
        name: name of the model.
        given: the request.
    """

    END = b""

    def __init__(self, name: str, given: ResponsesBody) -> None:
        super().__init__(name, "response", "response", "resp")
        self._given = given
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sent = 0
        self._text: list[str] = []
        self._lines: list[JSON] = []
        self._reason: str | None = None

    def complete(self, choices: list[JSON], usage: JSON) -> JSON:
        """See `Form`."""
        return self._response(self._status, choices, usage)

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`: an output message."""
        self._reason = reason
        return self._item(self._status, [_part(text, [] if scored is None else lines(scored))])

    def begin(self, index: int, before: str) -> list[JSON]:
        """See `Form`."""
        response, item = self._response("in_progress", [], None), self._item("in_progress", [])
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=_part("", [])),
        ]

    def chunks(self, index: int, text: str, scored: Scored | None, reason: str | None, more: JSON) -> list[JSON]:
        """See `Form`."""
        found = [] if scored is None else lines(scored)
        self._text.append(text)
        self._lines += found
        self._reason = reason
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [self._event("response.output_text.delta", **place, delta=text, logprobs=found)] if text or found else []

    def end(self, usage: JSON) -> list[JSON]:
        """See `Form`."""
        text = "".join(self._text)
        part = _part(text, self._lines)
        item = self._item(self._status, [part])
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=self._lines),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{self._status}", response=self._response(self._status, [item], usage)),
        ]

    def counted(self, usage: JSON) -> list[JSON]:
        """See `Form`: nothing, the last event has the usage."""
        return []

    def failed(self, refusal: Refusal) -> list[JSON]:
        """See `Form`."""
        error = {"code": refusal.code or "server_error", "message": str(refusal)}
        return [self._event("response.failed", response={**self._response("failed", [], None), "error": error})]

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> JSON:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _item(self, status: str, content: list[JSON]) -> JSON:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str, output: list[JSON], usage: JSON | None) -> JSON:
        given = self._given
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata,
            "model": self._head["model"],
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": given.reasoning_effort, "summary": None},
            "store": False,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "text": {"format": given.formats["text.format"] or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": given.top_logprobs,
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _part(text: str, logprobs: list[JSON]) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: JSON) -> JSON:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
