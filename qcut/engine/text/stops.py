"""Ends a text at the first of some strings."""

from __future__ import annotations

from collections.abc import Collection


class Stops:
    """Looks for strings in a text that comes in pieces, and holds back what may become one.

    The string that is complete first ends the text; of two that end at the same character, the longer one. In which
    pieces the text comes has no influence.

    Args:
        strings: of one character and more; none lets all text through.

    Attributes:
        found: the string that ended the text; None while it goes on.
    """

    def __init__(self, strings: Collection[str]) -> None:
        self._strings, self._held = tuple(strings), ""
        self._longest = max(map(len, self._strings), default=0)
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is certain after a piece: up to a string, or to what may be the beginning of one."""
        if self.found is not None:
            return ""
        text, self._held = self._held + piece, ""
        ends = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            return text[:start]
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._strings):
                self._held = text[-size:]
                return text[:-size]
        return text

    def rest(self) -> str:
        """The text held back so far, where no more comes."""
        text, self._held = self._held, ""
        return text
