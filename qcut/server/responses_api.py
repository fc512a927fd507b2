"""``/v1/responses``, OpenAI's newer interface: text and calls of functions; nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from qcut.engine.likelihoods import MOST_TOP
from qcut.server.answers import JSON, CallParts, ParsedForm
from qcut.server.bodies import AnyPrompt, Body, Message, Schema, ToolFields
from qcut.server.known_fields import IGNORED, RESPONSES_ONLY, Only
from qcut.server.logprobs import Scored, lines
from qcut.server.refusals import Refusal
from qcut.server.tools.choice import Parsing
from qcut.server.tools.items import messages_of
from qcut.server.tools.pieces import Piece
from qcut.server.tools.requests import checked_choice, checked_tools, flat_choice, flat_tool

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


class ResponsesBody(ToolFields, Body):
    """Body of ``/v1/responses``."""

    UNSERVED = RESPONSES_ONLY
    UNUSED = IGNORED - {"metadata"}
    PROMPT = "input"
    IS_FLAT = True
    tools: Annotated[
        list[dict[str, Any]], BeforeValidator(partial(checked_tools, is_flat=True)), Field(default_factory=list)
    ]
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(partial(checked_choice, is_flat=True))] = "auto"
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
        """See `Schema`. Checks ``input`` here, to give one error for all of its types; its items become messages."""
        given = super().renamed(given)
        if "input" not in given:
            raise Refusal(400, "input: Field required", param="input")
        asked = given["input"]
        if not isinstance(asked, str | list) or asked == []:
            raise Refusal(400, "input: allowed: a text, or a list of items", param="input")
        if isinstance(asked, list):
            given["input"] = messages_of(asked)
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


class _Item:
    """An item of the output as it grows.

    Args:
        kind: ``message``, ``reasoning`` or ``function_call``.
        index: of the item in the output.
        fields: of a call.

    Attributes:
        event: the beginning of the names of its events.
        text: of the content, or the arguments, so far.
        rows: log-probabilities of a message.
        place: where it is, for its events.
    """

    NAMES: ClassVar[Mapping[str, tuple[str, str]]] = {
        "message": ("msg", "output_text"),
        "reasoning": ("rs", "reasoning_text"),
        "function_call": ("fc", "function_call_arguments"),
    }

    def __init__(self, kind: str, index: int, **fields: str) -> None:
        prefix, event = self.NAMES[kind]
        self.kind, self.event, self._fields = kind, f"response.{event}", fields
        self._head = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind}
        self.text: list[str] = []
        self.rows: list[JSON] = []
        self.place: JSON = {"item_id": self._head["id"], "output_index": index}
        if kind != "function_call":
            self.place["content_index"] = 0

    def value(self, status: str) -> JSON:
        """The item; without content while it is in progress."""
        if self.kind == "function_call":
            return {**self._head, "status": status, **self._fields, "arguments": "".join(self.text)}
        content = [] if status == "in_progress" else [self.part]
        more: JSON = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**self._head, "status": status, **more, "content": content}

    @property
    def part(self) -> JSON:
        """The part of the content."""
        text = "".join(self.text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.rows)}


class Response(ParsedForm):
    """Responses of ``/v1/responses``; streams consist of numbered events with a type.

    Args:
        name: name of the model.
        given: the request.
        parsing: see `ParsedForm`.
    """

    END = b""

    def __init__(self, name: str, given: ResponsesBody, parsing: Parsing | None = None) -> None:
        super().__init__(name, "response", "response", "resp", parsing)
        self._given, self._id, self._created = given, f"resp_{uuid.uuid4().hex}", int(time.time())
        self._sent = 0
        self._item: _Item | None = None
        self._output: list[JSON] = []
        self._rows: list[JSON] = []  # log-probabilities that no item has yet
        self._reason: str | None = None

    def complete(self, choices: list[JSON], usage: JSON) -> JSON:
        """See `Form`."""
        (choice,) = choices
        return {**self._response(self._status, choice.pop("output"), usage), **choice}

    def choice(self, index: int, text: str, scored: Scored | None, reason: str | None) -> JSON:
        """See `Form`: the items of the output."""
        self.chunks(index, text, scored, reason, {})
        self._finish()
        return {"output": self._output}

    def begin(self, index: int, before: str) -> list[JSON]:
        """See `Form`."""
        response = self._response("in_progress", [], None)
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def chunks(self, index: int, text: str, scored: Scored | None, reason: str | None, more: JSON) -> list[JSON]:
        """See `Form`: events of items. Log-probabilities go to the message that is open, or opened next."""
        self._rows += [] if scored is None else lines(scored)
        self._reason = reason
        if self._parsing is None:
            events = self._grow("message", text) if text else []
        else:
            pieces, calls = self._parsed(index, text, reason is not None)
            events = [event for piece in pieces for event in self._take(piece, calls)]
        is_message = self._item is not None and self._item.kind == "message"
        return events + (self._grow("message", "") if self._rows and is_message else [])

    def end(self, usage: JSON) -> list[JSON]:
        """See `Form`."""
        events = self._finish()
        response = self._response(self._status, self._output, usage)
        return [*events, self._event(f"response.{self._status}", response=response)]

    def _take(self, piece: Piece, calls: CallParts) -> list[JSON]:
        """Events of a piece."""
        if piece.kind in ("content", "reasoning"):
            return self._grow("message" if piece.kind == "content" else "reasoning", piece.text)
        part = calls.take(piece)
        if part is None:
            return []
        if piece.kind == "call":
            return self._open("function_call", call_id=part["id"], name=piece.text)
        return self._grow("function_call", piece.text)

    def _grow(self, kind: str, text: str) -> list[JSON]:
        """Events of more text for an item of a kind."""
        events = [] if self._item is not None and self._item.kind == kind else self._open(kind)
        item = self._item
        assert item is not None
        item.text.append(text)
        more: JSON = {}
        if kind == "message":
            more, self._rows = {"logprobs": self._rows}, []
            item.rows += more["logprobs"]
        return [*events, self._event(f"{item.event}.delta", **item.place, delta=text, **more)]

    def _open(self, kind: str, **fields: str) -> list[JSON]:
        """Events of a new item, after those that close the one before."""
        events = self._close("completed")
        item = self._item = _Item(kind, len(self._output), **fields)
        value = item.value("in_progress")
        events.append(self._event("response.output_item.added", output_index=len(self._output), item=value))
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **item.place, part=item.part))
        return events

    def _close(self, status: str) -> list[JSON]:
        """Events of the end of an item, if there is one."""
        item, self._item = self._item, None
        if item is None:
            return []
        index, value = len(self._output), item.value(status)
        self._output.append(value)
        text = "".join(item.text)
        if item.kind == "function_call":
            events = [self._event(f"{item.event}.done", **item.place, arguments=text, name=value["name"])]
        else:
            more = {"logprobs": item.rows} if item.kind == "message" else {}
            events = [self._event(f"{item.event}.done", **item.place, text=text, **more)]
            events.append(self._event("response.content_part.done", **item.place, part=item.part))
        return [*events, self._event("response.output_item.done", output_index=index, item=value)]

    def _finish(self) -> list[JSON]:
        """Events of the end of all items; an answer without any gets an empty message."""
        events = [] if self._item is not None or self._output else self._open("message")
        return events + self._close(self._status)

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
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": given.reasoning_effort, "summary": None},
            "store": False,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "text": {"format": given.formats["text.format"] or {"type": "text"}},
            "tool_choice": flat_choice(given.tool_choice),
            "tools": [{**flat_tool(tool), "strict": False} for tool in given.tools],
            "top_logprobs": given.top_logprobs,
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: JSON) -> JSON:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
