"""Ends a text at the first of some strings."""

from __future__ import annotations

from collections.abc import Collection


class Stops:
    """Looks for strings in a text that comes in pieces, and holds back what may become one.

    The string that is complete first ends the text; of two that end at the same character, the longer one. In which
    pieces the text comes has no influence.

    Args:
        strings: of one character and more; none lets all text through. Hidden text may be part of a string.

    Attributes:
        found: the string that ended the text; None while it goes on.
    """

    def __init__(self, strings: Collection[str]) -> None:
        self._strings, self._held = tuple(strings), ""
        self._shown: list[bool] = []
        self._longest = max(map(len, self._strings), default=0)
        self.found: str | None = None

    def add(self, piece: str, hidden: bool = False) -> str:
        """The text that is certain after a piece: up to a string, or to what may be the beginning of one.

        A hidden piece is looked at, and not returned.
        """
        if self.found is not None:
            return ""
        self._held += piece
        self._shown += [not hidden] * len(piece)
        text = self._held
        ends = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            certain = self._take(start)
            self._take(len(self._held))
            return certain
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._strings):
                return self._take(len(text) - size)
        return self._take(len(text))

    def rest(self) -> str:
        """The text held back so far, where no more comes."""
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        """What is shown of the first characters that are held, which are held no longer."""
        text, shown = self._held[:end], self._shown[:end]
        self._held, self._shown = self._held[end:], self._shown[end:]
        return text if all(shown) else "".join(c for c, is_shown in zip(text, shown, strict=True) if is_shown)
