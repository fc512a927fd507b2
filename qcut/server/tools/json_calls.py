"""JSON of calls, read character by character, so that arguments are streamed as they come."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from qcut.server.tools.pieces import Piece

_SPACE = " \t\r\n"
_FIELDS = ("name", "arguments", "parameters", "type", "id")
State = Literal["going", "done", "failed"]


class Value:
    """Finds the end of a JSON value. Values that are no JSON end where their brackets and quotes do.

    Attributes:
        in_string: whether the next character is within a string.
    """

    def __init__(self, first: str) -> None:
        self._is_scalar = first not in '"{['
        self._depth, self.in_string, self._is_escaped = int(first in "{["), first == '"', False

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a number or a word, which the character after it ends."""
        return self._is_scalar

    def add(self, character: str) -> bool:
        """Read a character; whether the value ends with it, or before it if it is a scalar."""
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.in_string = False
                return self._depth == 0
            return False
        if self._is_scalar:
            return character in _SPACE or character in ",}]"
        if character == '"':
            self.in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth == 0


class CallObject:
    """A call that is an object with ``name`` and ``arguments`` or ``parameters``, in any order.

    The arguments are streamed as the model writes them, and may be invalid JSON. Arguments that are a string are the
    text in it.

    Args:
        end: marker that ends the call even if the JSON is broken: outside of strings, and at the start of a line.
        names: of functions that may be called, with arguments and no other fields than `_FIELDS`; None: any, and
            arguments may be missing.

    Attributes:
        state: ``done`` after the object, ``failed`` if it is none that is a call.
        begun: whether pieces have been returned.
        ended: whether `end` was read.
        rest: if the object failed, its text from the first wrong character on.
    """

    def __init__(self, end: str = "", names: Collection[str] | None = None) -> None:
        self.state: State = "going"
        self.begun = self.ended = False
        self.rest = ""
        self._characters: list[str] = []
        self._end, self._names, self._pending = end, names, ""
        self._place = "before"
        self._value: Value | None = None
        self._text: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._are_arguments = self._had_arguments = False

    @property
    def raw(self) -> str:
        """The text so far."""
        return "".join(self._characters)

    def add(self, character: str) -> list[Piece]:
        """Read a character of the call."""
        self._characters.append(character)
        if not self._end:
            return self._take(character)
        self._pending += character
        found: list[Piece] = []
        while self._pending and self.state == "going":
            marker = "\n" + self._end if self._value is not None and self._value.in_string else self._end
            if marker == self._pending:
                self.ended = True
                return found + self._close("done" if self.begun else "failed")
            if marker.startswith(self._pending):
                return found
            first, self._pending = self._pending[0], self._pending[1:]
            found += self._take(first)
        return found

    def finish(self) -> list[Piece]:
        """The end of the answer within the call."""
        pending, self._pending = self._pending, ""
        found = [piece for character in pending if self.state == "going" for piece in self._take(character)]
        if self.state == "going":
            found += self._close("done" if self.begun else "failed")
        return found

    def _take(self, character: str) -> list[Piece]:
        found = self._read(character)
        if self.state == "failed":
            self.rest = character + self._pending
        return found

    def _read(self, character: str) -> list[Piece]:
        if self._place == "value":
            return self._read_value(character)
        if character in _SPACE:
            return []
        expected = {"before": "{", "first": '"}', "key": '"', "colon": ":", "after": ",}"}.get(self._place)
        if expected is not None and character not in expected:
            return self._fail()
        if self._place == "start":
            return self._begin_value(character)
        if character == "}":
            return self._finish_object()
        if character == '"':
            self._value, self._text, self._place = Value('"'), ['"'], "value"
            self._key, self._are_arguments = "", False
            return []
        self._place = {"{": "first", ":": "start", ",": "key"}[character]
        return []

    @property
    def _is_named(self) -> bool:
        return self._name is not None and (self._names is None or self._name in self._names)

    def _begin_value(self, character: str) -> list[Piece]:
        if character in ",}]:":
            return self._fail()
        self._value, self._text, self._place = Value(character), [character], "value"
        self._are_arguments = self._key in ("arguments", "parameters") and not self._had_arguments
        self._had_arguments |= self._are_arguments
        if self._streams:
            return [*self._call(), Piece("arguments", character)]
        return []

    @property
    def _streams(self) -> bool:
        """Whether the value is streamed: arguments that are not a string, after the name."""
        return self._are_arguments and self._is_named and self._text[0] != '"'

    def _call(self) -> list[Piece]:
        if self.begun:
            return []
        self.begun = True
        return [Piece("call", self._name or "")]

    def _read_value(self, character: str) -> list[Piece]:
        assert self._value is not None
        ends = self._value.add(character)
        beyond = ends and self._value.is_scalar
        if not beyond:
            self._text.append(character)
        given = [Piece("arguments", character)] if self._streams and not beyond else []
        if not ends:
            return given
        given += self._end_value("".join(self._text))
        return given + self._read(character) if beyond and self.state == "going" else given

    def _end_value(self, text: str) -> list[Piece]:
        self._value = None
        if not self._key:  # the text is a key
            self._key, self._place = _string(text) or "?", "colon"
            return self._fail() if self._names is not None and self._key not in _FIELDS else []
        self._place = "after"
        streamed = self._streams
        found: list[Piece] = []
        if self._key == "name" and self._name is None:
            self._name = _string(text)
            if not self._name or not self._is_named:
                return self._fail()
            if self._early is not None:
                found = [*self._call(), Piece("arguments", self._early)]
        elif self._are_arguments and not streamed:
            whole = _string(text) if text[0] == '"' else text
            whole = text if whole is None else whole
            if self._is_named:
                found = [*self._call(), *([Piece("arguments", whole)] if whole else [])]
            else:
                self._early = whole
        return found

    def _finish_object(self) -> list[Piece]:
        if self.begun:
            return self._close("done")
        if not self._is_named or self._names is not None or self._had_arguments:
            return self._fail()
        return [*self._call(), Piece("arguments", "{}"), *self._close("done")]

    def _fail(self) -> list[Piece]:
        return self._close("failed")

    def _close(self, state: State) -> list[Piece]:
        self.state = state
        return []


def _string(text: str) -> str | None:
    """The string of a JSON text; None if it is no valid string."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
