"""Pieces of an answer: content, reasoning, and calls of tools, found in a text that comes bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: ``call`` begins a call and has its function's name; ``arguments`` are a part of those of the last call.
        text: never empty.
    """

    kind: Kind
    text: str


class Parser(Protocol):
    """Finds the pieces of an answer. The cuts between the texts that it gets have no influence on the joined pieces."""

    def add(self, text: str) -> list[Piece]:
        """The pieces that are certain with a text."""

    def end(self) -> list[Piece]:
        """The pieces that were held back, at the end of the answer."""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind joined, except calls."""
    found: list[tuple[Kind, list[str]]] = []
    for kind, text in pieces:
        if not found or found[-1][0] != kind or kind == "call":
            found.append((kind, []))
        found[-1][1].append(text)
    return [Piece(kind, "".join(texts)) for kind, texts in found]


def cut(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Cut a text at its first marker.

    Returns:
        The text before the marker, the marker, and the text after it. Without a marker: the text that later text does
        not change, None, and the end of the text that may be the beginning of a marker.
    """
    found = min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None)
    if found is not None:
        at, marker = found
        return text[:at], marker, text[at + len(marker) :]
    for size in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return text[:-size], None, text[-size:]
    return text, None, ""


class Content:
    """Content around calls, without the white space between them."""

    def __init__(self) -> None:
        self._space: str | None = ""
        self._has_calls = False

    def add(self, text: str) -> list[Piece]:
        """Pieces of content; white space after a call, and at the beginning, waits for what follows."""
        if self._space is not None:
            text = self._space + text
            self._space = text if not text.strip() else None
            if self._space is not None:
                return []
        return [Piece("content", text)] if text else []

    def called(self) -> None:
        """A call follows: white space before it is dropped."""
        self._space, self._has_calls = "", True

    def end(self) -> list[Piece]:
        """White space that is all of the answer."""
        return [Piece("content", self._space)] if self._space and not self._has_calls else []
