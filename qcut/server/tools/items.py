"""Items of ``/v1/responses``: messages, reasoning, calls and their results, as messages of a chat."""

from __future__ import annotations

from typing import Any

from qcut.server.known_fields import shown
from qcut.server.refusals import Refusal
from qcut.server.tools.requests import called_name

JSON = dict[str, Any]
KINDS = ("message", "function_call", "function_call_output", "reasoning")


def messages_of(items: list[Any]) -> list[Any]:
    """``input`` as messages of a chat: the items of one answer become one message.

    Args:
        items: as they are in the request. Messages are not checked here.

    Raises:
        Refusal: an item of another kind, or a field of one is wrong.
    """
    found: list[Any] = []
    for i, item in enumerate(items):
        where = f"input.{i}"
        kind = item.get("type") or "message" if isinstance(item, dict) else type(item).__name__
        last = found[-1] if found and isinstance(found[-1], dict) and found[-1].get("role") == "assistant" else {}
        calls = last.get("tool_calls") or []
        if kind == "message":
            given = {name for name, value in item.items() if value is not None}
            if item.get("role") == "assistant" and last and given & set(last) == {"role"}:
                found[-1] = {**item, **last}
            else:
                found.append(item)
        elif kind == "reasoning":
            found += [{"role": "assistant", "reasoning_content": text} for text in [_reasoning(item, where)] if text]
        elif kind == "function_call":
            name = called_name(item.get("name"), f"{where}.name")
            function = {"name": name, "arguments": _text(item, "arguments", where)}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            if not last or not isinstance(calls, list):  # what is no list is refused where messages are checked
                found.append({"role": "assistant"})
                calls = []
            found[-1] = {**found[-1], "tool_calls": [*calls, call]}
        elif kind == "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise _wrong(f"{where}.output", output, "a text, or a list of text parts")
            found.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
        else:
            allowed = f"{', '.join(KINDS)}. The model reads and writes text only"
            raise Refusal(
                400, f"{where}: found {str(kind)[:80]}; allowed: {allowed}", param="input", code="unsupported"
            )
    return found


def _reasoning(item: JSON, where: str) -> str:
    """The text of reasoning, or its summary if the text is not there."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise _wrong(f"{where}.{name}", parts, "a list of parts with a text")
        texts = [_text(part, "text", f"{where}.{name}") for part in parts]
        if texts:
            return "\n".join(texts)
    return ""


def _text(item: object, name: str, where: str) -> str:
    found = item.get(name) if isinstance(item, dict) else None
    if not isinstance(found, str):
        raise _wrong(f"{where}.{name}", found, "a text")
    return found


def _wrong(where: str, value: object, allowed: str) -> Refusal:
    return Refusal(400, f"{where}: found {shown(value)}; allowed: {allowed}", param=where)
