"""Grammars of answers that call functions or have a form, in llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qcut.errors import ConstraintError
from qcut.server.known_fields import shown
from qcut.server.refusals import Refusal
from qcut.server.structured import Asked
from qcut.server.tools.requests import Calling
from qcut.text.constraint import Constraint
from qcut.text.matcher import COMPACT_JSON

JSON = dict[str, Any]
_VALUES = ("const", "enum")  # keywords whose values are no schemas
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties")  # keywords whose values are schemas by names


class CallSyntax(NamedTuple):
    """How a family of models writes calls, in parts of rules.

    Attributes:
        field: of the arguments in an object with the name of the function; or what comes before the arguments, by the
            name.
        call: a call; ``tool`` stands for all functions with their arguments.
        between: what comes between two calls; None: an answer has one call.
        first: what comes before all calls.
        last: what comes after all calls.
    """

    field: str | Callable[[str], str]
    call: str = "tool"
    between: str | None = ""
    first: str = ""
    last: str = ""


class AnswerGrammar:
    """Writes the grammars of a model's answers, which its parsers read back.

    Args:
        calls: name of the parser of calls, one of `qcut.server.tools.choice.TOOL_PARSERS`.
        thought: markers of reasoning at the beginning of an answer; None: it has none.
        harmony: whether answers are messages in channels.
        template: the chat template.
        tokens: ids of added tokens by their spelling. Grammars have the token of a marker, if there is one.
    """

    def __init__(
        self, calls: str, thought: tuple[str, str] | None, harmony: bool, template: str, tokens: Mapping[str, int]
    ) -> None:
        self._thought, self._harmony, self._tokens = thought, harmony, tokens
        if calls == "mistral" and "[ARGS]" in template:
            calls = "mistral with ids" if "[CALL_ID]" in template else "mistral with names"
        self._syntax = self._syntaxes().get(calls)

    def asked(self, calling: Calling, prompt: str, content: Asked | None = None) -> Asked:
        """The constraint of an answer: reasoning if there is any, then the content or calls.

        Args:
            calling: functions that may be called.
            prompt: the end of the prompt's text.
            content: a JSON Schema of the content; None: the answer calls a function.

        Raises:
            Refusal: parameters are no object, or the grammar is too long.
        """
        answers, rules, places = [], list[str](), dict[int, tuple[str, str]]()

        def add(rule: str, path: str, function: str = "") -> None:
            rules.append(rule)
            places[len(rules) + 1] = path, function

        if content is not None:
            answers.append(f"{self._head('final')} content" if self._harmony else "content")
            add(f"content: {_json(json.loads(content.constraint.text))}", content.param)
        if self._syntax is not None and calling.tools:
            field, call, between, first, last = self._syntax
            more = "" if between is None or not calling.several else f"({between} {call})*"
            answers.append(f"{first} {call} {more} {last}")
            for i, (path, tool) in enumerate(zip(calling.paths, calling.tools, strict=True)):
                name, parameters = tool["function"]["name"], _parameters(tool, path)
                written = _object(name, field, parameters) if isinstance(field, str) else parameters
                add(f"tool{i}: {'' if isinstance(field, str) else field(name)} {_json(written)}", path, name)
            rules.append(f"tool: {' | '.join(f'tool{i}' for i in range(len(calling.tools)))}")
        begin, thought = self._reasoning(prompt)
        text = "\n".join([f"start: {begin} ({' | '.join(answers)})", *rules, *thought])
        param = "tools" if content is None else content.param
        try:
            return Asked(param, Constraint.grammar(text), places)
        except ConstraintError as error:
            raise Refusal(400, f"{param}: {error}", param=param) from error

    def _syntaxes(self) -> dict[str, CallSyntax]:
        """The syntax of calls by the parser that reads it."""
        mark = self._mark

        def mistral(identifier: str) -> CallSyntax:
            return CallSyntax(lambda name: f'{mark("[TOOL_CALLS]")} "{name}" {identifier} {mark("[ARGS]")}')

        hermes = f'{mark("<tool_call>")} "\\n" tool "\\n" {mark("</tool_call>")}'
        first = f'{mark("[TOOL_CALLS]")} " "? "["'
        return {
            "hermes": CallSyntax("arguments", hermes, '"\\n"'),
            "llama3": CallSyntax("parameters", between='"; "'),
            "mistral": CallSyntax("arguments", between='", "', first=first, last='"]"'),
            "mistral with names": mistral(""),
            "mistral with ids": mistral(f"({mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"),
            "harmony": CallSyntax(lambda name: self._head(f"commentary to=functions.{name} ", True), between=None),
        }

    def _head(self, channel: str, is_json: bool = False) -> str:
        """The head of a message in a channel."""
        kind = f'{self._mark("<|constrain|>")} "json"' if is_json else ""
        return f'{self._mark("<|channel|>")} "{channel}" {kind} {self._mark("<|message|>")}'

    def _reasoning(self, prompt: str) -> tuple[str, list[str]]:
        """What an answer begins with, and its rules."""
        if self._harmony:
            begin = f'({self._head("analysis")} thought {self._mark("<|start|>")} "assistant")?'
            return begin, self._up_to("<|end|>")
        if self._thought is None or prompt.rstrip().endswith(self._thought[1]):
            return "", []
        opening, closing = self._thought
        space = "/\\n{1,2}/?"
        if prompt.rstrip().endswith(opening):
            return f"thought {space}", self._up_to(closing)
        return f"({self._mark(opening)} thought {space})?", self._up_to(closing)

    def _up_to(self, marker: str) -> list[str]:
        """The rule of a text that ends with a marker."""
        if marker in self._tokens:
            return [f"thought: /(?s:.*)/ {self._mark(marker)}"]
        pattern = re.escape(marker).replace("/", r"\/")
        return [f"thought[lazy]: /(?s:.*){pattern}/"]

    def _mark(self, marker: str) -> str:
        return f"<[{self._tokens[marker]}]>" if marker in self._tokens else json.dumps(marker)


def _parameters(tool: JSON, path: str) -> JSON:
    """The JSON Schema of a function's arguments.

    Raises:
        Refusal: they are no object, which parsers need.
    """
    found: JSON = tool["function"]["parameters"]
    if found.get("type", "object") != "object":
        message = f'{path}.type: found {shown(found["type"])}; allowed: "object", to force a call'
        raise Refusal(400, message, param=f"{path}.type")
    if set(found) <= {"type", "properties"} and not found.get("properties"):
        return {"type": "object", "additionalProperties": False}  # a function without parameters
    return {**found, "type": "object"}


def _object(name: str, field: str, parameters: JSON) -> JSON:
    """The JSON Schema of a call that is an object."""
    moved = _moved(parameters, f"#/properties/{field}")
    draft = {"$schema": moved.pop("$schema")} if "$schema" in moved else {}
    moved.pop("$id", None)  # references would be relative to it
    properties = {"name": {"const": name}, field: moved}
    return {
        **draft,
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _moved(value: Any, place: str, has_keywords: bool = True) -> Any:
    """A part of a schema with references to the place where the schema now is; its keys may be names of schemas."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, dict):
        return value
    if not has_keywords:
        return {name: _moved(one, place) for name, one in value.items()}
    found = {key: one if key in _VALUES else _moved(one, place, key not in _BY_NAME) for key, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference + "/").startswith("#/"):
        found["$ref"] = place + reference[1:]
    return found


def _json(schema: JSON) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': COMPACT_JSON})}"
