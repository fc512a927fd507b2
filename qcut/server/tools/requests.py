"""The fields of tools: checked, and as chat templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from qcut.server.known_fields import shown
from qcut.server.limits.json_body import parse_json
from qcut.server.refusals import Refusal

JSON = dict[str, Any]
MOST_TOOLS = 128
MOST_CALLS = 1024
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_NO_PARAMETERS: JSON = {"type": "object", "properties": {}}
_NAMES = "1 to 128 letters, digits, and any of _ - . :"


def checked_tools(value: object) -> list[JSON]:
    """``tools``: functions with a name, a description and a JSON schema of their parameters, and no other fields.

    Raises:
        Refusal: names the first field that is wrong.
    """
    tools = _list(value, "tools", MOST_TOOLS)
    found = [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _wrong(f"tools.{i}.function.name", name, "a name that no other function has")
    return found


def checked_choice(value: object) -> str | JSON:
    """``tool_choice``: ``none``, ``auto``, ``required``, or a function by its name.

    Raises:
        Refusal: anything else.
    """
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
    allowed = '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'
    raise _wrong("tool_choice", value, allowed)


def check_choice(tools: Sequence[JSON], choice: str | JSON) -> None:
    """Check that a choice fits the tools.

    Raises:
        Refusal: a function that is not among the tools, or no tools for a call that is required.
    """
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise _wrong("tool_choice", choice["function"]["name"], f"a function of tools: {shown(names)}")
    if choice == "required" and not tools:
        raise _wrong("tool_choice", choice, '"none", "auto", or tools to call')


def checked_calls(value: object) -> list[JSON]:
    """``tool_calls`` of an assistant's message.

    Raises:
        Refusal: names the first field that is wrong.
    """
    where = "messages.tool_calls"
    found = []
    for i, call in enumerate(_list(value, where, MOST_CALLS)):
        path = f"{where}.{i}"
        function = _function(call, path)
        arguments = function.get("arguments")
        arguments = "{}" if arguments is None or arguments == "" else arguments
        if not isinstance(arguments, str | dict):
            raise _wrong(f"{path}.function.arguments", arguments, "a text with JSON")
        identifier = call.get("id")
        if identifier is not None and not isinstance(identifier, str):
            raise _wrong(f"{path}.id", identifier, "a text")
        named = {} if identifier is None else {"id": identifier}
        made = {"name": function["name"], "arguments": _object(arguments)}
        found.append({**named, "type": "function", "function": made})
    return found


def with_text_arguments(messages: Sequence[JSON]) -> list[JSON]:
    """Messages in which the arguments of calls are JSON texts, for templates that take no objects."""
    found = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def without_calls(messages: Sequence[JSON]) -> list[JSON]:
    """Messages without their calls."""
    return [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]


def _tool(tool: object, where: str) -> JSON:
    function = _function(tool, where)
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.function.description", description, "a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong(f"{where}.function.parameters", parameters, "a JSON schema, which is an object")
    # Templates read all three fields, as transformers has them, without asking whether they are there.
    made = {"name": function["name"], "description": description or "", "parameters": parameters or _NO_PARAMETERS}
    return {"type": "function", "function": made}


def _function(value: object, where: str) -> JSON:
    """The function of a tool or a call, with a valid name."""
    if not isinstance(value, dict):
        raise _wrong(where, value, 'an object with type "function"')
    if value.get("type", "function") != "function":
        raise _wrong(f"{where}.type", value["type"], '"function"')
    function = value.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.function.name", name, _NAMES)
    return function


def _list(value: object, where: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise _wrong(where, value, f"a list of at most {most}")
    return value


def _object(arguments: str | JSON) -> str | JSON:
    """Arguments as an object; as they are if their text is no object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return parse_json(arguments.encode("utf-8", "replace"))
    except Refusal:
        return arguments


def _text(arguments: str | JSON) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _wrong(where: str, value: object, allowed: str) -> Refusal:
    return Refusal(400, f"{where}: found {shown(value)}; allowed: {allowed}", param=where)
