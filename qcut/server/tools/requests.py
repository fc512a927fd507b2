"""The fields of tools: checked, and as chat templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from qcut.server.known_fields import shown
from qcut.server.limits.json_body import parse_json
from qcut.server.refusals import Refusal

JSON = dict[str, Any]
MOST_TOOLS = 128
MOST_CALLS = 1024
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_NO_PARAMETERS: JSON = {"type": "object", "properties": {}}


def checked_tools(value: object, is_flat: bool = False) -> list[JSON]:
    """``tools``: functions with a name, a description and a JSON schema of their parameters, and no other fields.

    Args:
        value: as it is in the request.
        is_flat: whether the fields of functions stand next to the type, as in ``/v1/responses``.

    Returns:
        Tools with functions in ``function``.

    Raises:
        Refusal: names the first field that is wrong.
    """
    tools = _list(value, "tools", MOST_TOOLS)
    found = [_tool(tool, f"tools.{i}", is_flat) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _wrong(f"{path_of(i, is_flat)}.name", name, "a name that no other function has")
    return found


def path_of(index: int, is_flat: bool = False) -> str:
    """The path of a function in a request."""
    return f"tools.{index}" if is_flat else f"tools.{index}.function"


def checked_choice(value: object, is_flat: bool = False) -> str | JSON:
    """``tool_choice``: ``none``, ``auto``, ``required``, a function by its name, or ``allowed_tools``.

    Args:
        value: as it is in the request.
        is_flat: see `checked_tools`.

    Returns:
        The choice as `flat_choice` takes it.

    Raises:
        Refusal: anything else.
    """
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and (name := _name_of(value, is_flat)) is not None:
        return _chosen(name)
    if isinstance(value, dict) and kind == "allowed_tools":
        given, where = (value, "tool_choice") if is_flat else (value.get("allowed_tools"), "tool_choice.allowed_tools")
        if isinstance(given, dict) and given.get("mode") in ("auto", "required"):
            names = [_name_of(tool, is_flat) for tool in _list(given.get("tools"), f"{where}.tools", MOST_TOOLS)]
            if names and None not in names:
                tools = [_chosen(str(name)) for name in names]
                return {"type": "allowed_tools", "allowed_tools": {"mode": given["mode"], "tools": tools}}
    function = '"name": …' if is_flat else '"function": {"name": …}'
    allowed = f'"none", "auto", "required", {{"type": "function", {function}}}, or allowed_tools'
    raise _wrong("tool_choice", value, allowed)


def called_name(value: object, where: str) -> str:
    """The name of a function in an earlier call, which is what the model has written: any text.

    Raises:
        Refusal: no text, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise _wrong(where, value, "a text of 1 character and more")
    return value


def flat_tool(tool: JSON) -> JSON:
    """A tool in the form of ``/v1/responses``."""
    return {"type": tool["type"], **tool["function"]}


def flat_choice(choice: str | JSON) -> str | JSON:
    """A choice in the form of ``/v1/responses``."""
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return flat_tool(choice)
    given = choice["allowed_tools"]
    return {"type": "allowed_tools", "mode": given["mode"], "tools": [flat_tool(tool) for tool in given["tools"]]}


class Calling(NamedTuple):
    """The calls of an answer.

    Attributes:
        tools: functions that may be called.
        paths: of their parameters in the request.
        is_forced: whether the answer has to call one.
        several: whether it may have several calls.
    """

    tools: tuple[JSON, ...] = ()
    paths: tuple[str, ...] = ()
    is_forced: bool = False
    several: bool = True


def calling(tools: Sequence[JSON], choice: str | JSON, several: bool, paths: Sequence[str]) -> Calling:
    """The calls that a request asks for.

    Args:
        tools: as `checked_tools` returns them.
        choice: as `checked_choice` returns it.
        several: ``parallel_tool_calls``.
        paths: of the tools' parameters.

    Raises:
        Refusal: the choice names a function that is not among the tools, or there are no tools for a call.
    """
    mode, wanted = choice, None
    if isinstance(choice, dict):
        is_function = choice["type"] == "function"
        mode = "required" if is_function else choice["allowed_tools"]["mode"]
        chosen = [choice] if is_function else choice["allowed_tools"]["tools"]
        wanted = [tool["function"]["name"] for tool in chosen]
        several = several and not is_function
    names = [tool["function"]["name"] for tool in tools]
    for name in wanted or ():
        if name not in names:
            raise _wrong("tool_choice", name, f"a function of tools: {shown(names)}")
    if mode == "required" and not tools:
        raise _wrong("tool_choice", choice, '"none", "auto", or tools to call')
    which = [i for i, name in enumerate(names) if wanted is None or name in wanted]
    return Calling(tuple(tools[i] for i in which), tuple(paths[i] for i in which), mode == "required", several)


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
        name = called_name(function.get("name"), f"{path}.function.name")
        arguments = function.get("arguments")
        arguments = "{}" if arguments is None or arguments == "" else arguments
        if not isinstance(arguments, str | dict):
            raise _wrong(f"{path}.function.arguments", arguments, "a text with JSON")
        identifier = call.get("id")
        if identifier is not None and not isinstance(identifier, str):
            raise _wrong(f"{path}.id", identifier, "a text")
        named = {} if identifier is None else {"id": identifier}
        made = {"name": name, "arguments": _object(arguments)}
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


def _tool(tool: object, where: str, is_flat: bool) -> JSON:
    function = _function(tool, where, is_flat)
    path = where if is_flat else f"{where}.function"
    name, description, parameters = (function.get(field) for field in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{path}.name", name, "1 to 128 letters, digits, and any of _ - . :")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{path}.description", description, "a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong(f"{path}.parameters", parameters, "a JSON schema, which is an object")
    # Templates read all three fields, as transformers has them, without asking whether they are there.
    made = {"name": name, "description": description or "", "parameters": parameters or _NO_PARAMETERS}
    return {"type": "function", "function": made}


def _function(value: object, where: str, is_flat: bool = False) -> JSON:
    """The function of a tool or a call."""
    if not isinstance(value, dict):
        raise _wrong(where, value, 'an object with type "function"')
    if value.get("type") not in (None, "function"):
        raise _wrong(f"{where}.type", value["type"], '"function"')
    path, function = (where, value) if is_flat else (f"{where}.function", value.get("function"))
    if not isinstance(function, dict):
        raise _wrong(path, function, "an object with a name")
    return function


def _name_of(tool: object, is_flat: bool) -> str | None:
    """The name of a function that a choice names."""
    function = tool if is_flat or not isinstance(tool, dict) else tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _chosen(name: str) -> JSON:
    return {"type": "function", "function": {"name": name}}


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
