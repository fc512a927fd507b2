"""Constraints: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qcut.common.failures import line_of
from qcut.errors import ConstraintError, shown

Kind = Literal["json_schema", "regex", "choice", "grammar"]

MOST_BYTES: Mapping[Kind, int] = {"json_schema": 1 << 17, "regex": 1 << 12, "choice": 1 << 16, "grammar": 1 << 16}
"""Most bytes of a constraint's text, in UTF-8, by its kind."""
MOST_CHOICES = 1024
MOST_DEPTH = 64
"""Deepest nesting of arrays and objects in a schema."""


@dataclass(frozen=True)
class Constraint:
    """The form of an answer: a sequence's new tokens are chosen so that their text has it.

    Made by `json_schema`, `json_object`, `regex`, `choice` or `grammar`, and passed to `qcut.Engine.generate` or
    `qcut.Scheduler.submit` as ``constraint``.

    Attributes:
        kind: ``json_schema``, ``regex``, ``choice`` or ``grammar``.
        text: the schema as JSON, the expression, the choices as a JSON list, or the grammar.

    Raises:
        ConstraintError: another kind, or a text that is empty or longer than `MOST_BYTES`.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in MOST_BYTES:
            raise ConstraintError(f"constraint of kind {shown(self.kind)}; allowed: {', '.join(MOST_BYTES)}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConstraintError(f"{self.kind} is {shown(self.text)}; allowed: a string with 1 character and more")
        size, most = len(self.text.encode("utf-8", "surrogatepass")), MOST_BYTES[self.kind]
        if size > most:
            raise ConstraintError(f"{self.kind} has {size} bytes; allowed: {most}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """JSON that a schema describes.

        Between its parts there may be a space, or a line's end and up to 40 spaces or tabs; with llguidance before 1.8
        a space only after commas and colons.

        Args:
            schema: a JSON Schema of draft 2020-12, as a mapping or as JSON, with the keywords that llguidance has: it
                refuses others. References lead to places in the schema.

        Raises:
            ConstraintError: not a JSON object, nested deeper than `MOST_DEPTH`, or too long. Unknown keywords and types
                are refused when the constraint is used.
        """
        found: Any = schema
        if isinstance(schema, str):
            cls("json_schema", schema)  # its length is checked before it is parsed
            try:
                found = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ConstraintError(f"json_schema is no JSON: {line_of(error)}; allowed: an object") from None
        if not isinstance(found, Mapping):
            raise ConstraintError(f"json_schema is {shown(found)}; allowed: a JSON object")
        _check_depth(found)
        try:
            text = json.dumps(found, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"json_schema is no JSON: {line_of(error)}; allowed: an object") from None
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object, written as `json_schema` has it."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Text that a regular expression describes, from its first to its last character.

        Args:
            pattern: in the syntax of Rust's crate ``regex``, without anchors and look-around.

        Raises:
            ConstraintError: empty, or too long. Its syntax is checked when the constraint is used.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of some strings.

        Args:
            choices: 1 to `MOST_CHOICES` strings of 1 character and more.

        Raises:
            ConstraintError: choices are none of that, or too long.
        """
        allowed = f"a list of 1 to {MOST_CHOICES} strings, of 1 character and more each"
        if isinstance(choices, str | bytes) or not isinstance(choices, Sequence):
            raise ConstraintError(f"choice is {shown(choices)}; allowed: {allowed}")
        if not 1 <= len(choices) <= MOST_CHOICES:
            raise ConstraintError(f"choice has {len(choices)} strings; allowed: {allowed}")
        for one in choices:
            if not isinstance(one, str) or not one:
                raise ConstraintError(f"choice has {shown(one)}; allowed: {allowed}")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Text that a context-free grammar describes.

        Args:
            text: in llguidance's form of Lark's syntax, with ``start`` as first rule; or in llama.cpp's GBNF, with
                ``root`` as first rule.

        Raises:
            ConstraintError: empty, or too long. Its syntax is checked when the constraint is used.
        """
        return cls("grammar", text)

    def __str__(self) -> str:
        return self.kind


def _check_depth(schema: Mapping[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MOST_DEPTH):
        inner = [each for one in level for each in (one.values() if isinstance(one, Mapping) else one)]
        level = [each for each in inner if isinstance(each, Mapping | list | tuple)]
        if not level:
            return
    raise ConstraintError(f"json_schema is nested deeper than allowed: {MOST_DEPTH}")
