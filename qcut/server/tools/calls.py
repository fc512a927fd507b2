"""Parsers of calls in content, by the families of models that write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from qcut.server.tools.json_calls import CallObject, Value
from qcut.server.tools.pieces import Content, Piece, cut


class Calls:
    """Calls that follow markers in content. What turns out to be no call is content, markers included.

    Args:
        markers: each of them begins a call.

    Attributes:
        ENDS: what may follow a call, and says nothing. The end of an answer may cut it.
    """

    ENDS: tuple[str, ...] = ()

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._content, self._held, self._object = Content(), "", CallObject()
        self._state = "content"
        self._steps: dict[str, Callable[[], list[Piece]]] = {
            "content": self._in_content,
            "marked": self._in_marked,
            "object": self._in_object,
            "called": self._in_called,
        }
        self._raw = ""  # text of a call that has not been sent at all

    def add(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._held += text
        found: list[Piece] = []
        before: tuple[str, str] | None = None
        while self._held and before != (self._state, self._held):
            before = self._state, self._held
            found += self._steps[self._state]()
        return found

    def end(self) -> list[Piece]:
        """See `Parser`."""
        found: list[Piece] = []
        if self._state in ("called", "object"):
            rest = self._raw + (self._object.raw if self._state == "object" else "") + self._held
            if any(end.startswith(rest.strip()) for end in self.ENDS):
                return []
        if self._state == "object":
            found += self._of(self._object.finish())
            found += self._after_object()
        held, self._held = self._raw + self._held, ""
        return found + self._content.add(held) + self._content.end()

    def _in_content(self) -> list[Piece]:
        before, marker, self._held = cut(self._held, self._markers)
        if marker is not None:
            self._raw, self._state = marker, "marked"
        return self._content.add(before)

    def _in_marked(self) -> list[Piece]:
        """After a marker."""
        raise NotImplementedError

    def _begin_object(self, end: str = "", names: Collection[str] | None = None) -> list[Piece]:
        self._object, self._state = CallObject(end, names), "object"
        return []

    def _in_object(self) -> list[Piece]:
        text, found, used = self._held, list[Piece](), 0
        while used < len(text) and self._object.state == "going":
            found += self._object.add(text[used])
            used += 1
        self._held = text[used:]
        return self._of(found) + self._after_object()

    def _of(self, pieces: list[Piece]) -> list[Piece]:
        if any(piece.kind == "call" for piece in pieces):
            self._content.called()
            self._raw = ""
        return pieces

    def _after_object(self) -> list[Piece]:
        if self._object.state == "going":
            return []
        if self._object.state == "failed":
            rest = self._object.rest
            text = "" if self._object.begun else (self._raw + self._object.raw).removesuffix(rest)
            self._raw, self._held, self._state = "", rest + self._held, "content"
            return self._content.add(text)
        self._state = "content" if self._object.ended else "called"
        return []

    def _in_called(self) -> list[Piece]:
        """After a call that its JSON has ended."""
        raise NotImplementedError

    def _fail(self) -> list[Piece]:
        raw, self._raw, self._state = self._raw, "", "content"
        return self._content.add(raw)


class HermesCalls(Calls):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    MARKERS = ("<tool_call>", "</tool_call>")
    ENDS = ("</tool_call>",)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__("<tool_call>")

    def _in_marked(self) -> list[Piece]:
        return self._begin_object("</tool_call>")

    def _in_called(self) -> list[Piece]:
        text = self._held.lstrip()
        if text.startswith("</tool_call>"):
            self._held, self._state = text[len("</tool_call>") :], "content"
        elif text and not "</tool_call>".startswith(text):
            self._state = "content"
        return []


class LlamaCalls(Calls):
    """``{"name": …, "parameters": …}`` as the whole answer or after ``<|python_tag|>``, several with ``;``: Llama 3.

    Only functions of the request are called, since the object may also be an answer in JSON.
    """

    MARKERS = ("<|python_tag|>",)
    ENDS = (";",)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(*self.MARKERS)
        self._names, self._state = names, "first"
        self._steps["first"] = self._in_first

    def _in_first(self) -> list[Piece]:
        text = self._held.lstrip()
        if text:
            self._state = "content"
            if text[0] == "{":
                self._raw, self._held = self._held[: -len(text)], text
                return self._begin_object(names=self._names)
        return []

    def _in_marked(self) -> list[Piece]:
        return self._begin_object(names=self._names)

    def _in_called(self) -> list[Piece]:
        found = re.match(r"(\s*;?\s*)(.?)", self._held, re.DOTALL)
        assert found is not None
        if found[2] == "{":
            self._raw, self._held = found[1], self._held[len(found[1]) :]
            return self._begin_object(names=self._names)
        if found[2]:
            self._state = "content"
        return []


class MistralCalls(Calls):
    """``[TOOL_CALLS][{"name": …, "arguments": …}, …]`` and ``[TOOL_CALLS]name[ARGS]{…}``: Mistral."""

    MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    ENDS = (",", "]")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__("[TOOL_CALLS]")
        self._is_list = False
        self._value: Value | None = None
        self._steps |= {"name": self._in_name, "arguments": self._in_arguments}

    def _in_marked(self) -> list[Piece]:
        text = self._held.lstrip()
        if not text:
            return []
        self._raw += self._held[: -len(text)]
        self._held, self._is_list = text, text[0] == "["
        if self._is_list:
            self._raw, self._held = self._raw + "[", text[1:]
            return self._begin_object()
        if text[0] == "{":
            return self._begin_object()
        self._state = "name"
        return []

    def _in_called(self) -> list[Piece]:
        if not self._is_list:
            self._state = "content"
            return []
        text = self._held.lstrip()
        if not text:
            return []
        if text[0] == ",":
            self._raw, self._held = self._held[: 1 - len(text)] or self._held, text[1:]
            return self._begin_object()
        self._held, self._state = text[1:] if text[0] == "]" else self._held, "content"
        return []

    def _in_name(self) -> list[Piece]:
        found = re.match(r"([\w.:-]{1,128})\s*(\[CALL_ID\][^\[{]{0,64})?(\[ARGS\])?\s*", self._held)
        if found is None:
            return self._fail()
        rest = self._held[found.end() :]
        if rest[:1] == "{":
            name, self._held = found[1], rest[1:]
            self._value, self._state = Value("{"), "arguments"
            return self._of([Piece("call", name), Piece("arguments", "{")])
        return [] if any(marker.startswith(rest) for marker in ("[ARGS]", "[CALL_ID]")) else self._fail()

    def _in_arguments(self) -> list[Piece]:
        assert self._value is not None
        for used, character in enumerate(self._held, 1):
            if self._value.add(character):
                text, self._held, self._state = self._held[:used], self._held[used:], "content"
                return [Piece("arguments", text)]
        text, self._held = self._held, ""
        return [Piece("arguments", text)]
