"""Structured answers: the constraint of a request, in the fields of OpenAI's, vLLM's and llama.cpp's servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from qcut.errors import ConstraintError
from qcut.server.known_fields import shown
from qcut.server.refusals import Refusal
from qcut.text.constraint import Constraint

_MAKE: Mapping[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "json_object": lambda _: Constraint.json_object(),
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}
_IGNORED = frozenset({"backend", "disable_fallback"})
_OFF = frozenset({"disable_any_whitespace", "disable_additional_properties", "json_object"})
_IN_LINE = re.compile(r"grammar: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \||$)")
_FORMATS = ("text", "json_object", "json_schema")


class Asked(NamedTuple):
    """A constraint that a request asks for.

    Attributes:
        param: path of the field.
        constraint: not yet tried on the model's tokens.
        places: paths of the schemas in a grammar, and names of their functions, by their lines.
    """

    param: str
    constraint: Constraint
    places: Mapping[int, tuple[str, str]] = {}

    def refusal(self, error: ConstraintError) -> Refusal:
        """The refusal for a constraint that is wrong."""
        found = _IN_LINE.match(str(error))
        if found is None or int(found[1]) not in self.places:
            return _refused(self.param, str(error))
        param, name = self.places[int(found[1])]
        what = f"of {name}: {found[2]}" if name else found[2]
        return _refused(param, f"{what}; allowed: JSON Schema of draft 2020-12 with the keywords that llguidance has")


def asked(formats: Mapping[str, dict[str, Any] | None], fields: Mapping[str, Any]) -> Asked | None:
    """The constraint of a request; None if there is none.

    Args:
        formats: by the field's path, ``response_format`` of OpenAI's chats, or ``text.format`` of its responses.
        fields: vLLM's and llama.cpp's fields. Values that ask for nothing are False, "", [] and {}.

    Raises:
        Refusal: several constraints, or one that is wrong or too large. The message names the field.
    """
    found = [each for param, value in formats.items() if value is not None for each in _of_format(param, value)]
    for name in ("json_object", "regex", "choice", "grammar"):
        if value := fields.get(f"guided_{name}"):
            found.append((f"guided_{name}", name, value))
    if (value := fields.get("guided_json")) is not None:
        found.append(("guided_json", "json", value))
    for name, kind in (("json_schema", "json"), ("grammar", "grammar")):
        if value := fields.get(name):
            found.append((name, kind, value))
    found += _of_outputs(fields.get("structured_outputs") or {})
    if not found:
        return None
    if len(found) > 1:
        raise _refused(found[1][0], f"found next to {found[0][0]}; allowed: one constraint in a request")
    ((param, kind, value),) = found
    try:
        return Asked(param, _MAKE[kind](value))
    except ConstraintError as error:
        raise _refused(param, str(error)) from error


def _of_format(param: str, value: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The constraint of ``response_format`` or ``text.format``: field, kind and value."""
    kind = value.get("type")
    if kind not in _FORMATS:
        allowed = ", ".join(_FORMATS)
        raise Refusal(
            400, f"{param}.type: found {shown(kind)}; allowed: {allowed}", param=f"{param}.type", code="unsupported"
        )
    if kind == "json_object":
        yield param, "json_object", None
    if kind == "json_schema":
        place, inner = param, cast(Any, value)
        if param == "response_format":  # the newer form has the schema next to the type
            place, inner = f"{param}.json_schema", value.get("json_schema")
        if not isinstance(inner, dict):
            raise _refused(place, f"found {shown(inner)}; allowed: an object with a schema")
        if not isinstance(inner.get("schema"), dict):
            raise _refused(f"{place}.schema", f"found {shown(inner.get('schema'))}; allowed: a JSON Schema, an object")
        yield f"{place}.schema", "json", inner["schema"]


def _of_outputs(given: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The constraints of vLLM's ``structured_outputs``."""
    for name, value in given.items():
        if value is None or name in _IGNORED or (name in _OFF and value is False):
            continue
        param = f"structured_outputs.{name}"
        if name not in _MAKE or (name == "json_object" and value is not True):
            allowed = f"{', '.join(_MAKE)}, one of them"
            raise Refusal(400, f"{param}: found {shown(value)}; allowed: {allowed}", param=param, code="unsupported")
        yield param, name, value


def _refused(param: str, message: str) -> Refusal:
    return Refusal(400, f"{param}: {message}", param=param)
