"""`SequenceText`: the text of a sequence as tokens come, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qcut.text.detokenizer import Detokenizer


class StopStrings:
    """Searches strings in a text that comes piece by piece, and holds back a possible beginning of one.

    The string that is complete first ends the text; of two that end at the same character, the longer one. The cuts
    between pieces have no influence.

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
        """The text up to a string, or to a possible beginning of one. A hidden piece is searched, but not returned."""
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
        """The text held back so far."""
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        """Release the first characters held back; returns those that are shown."""
        text, shown = self._held[:end], self._shown[:end]
        self._held, self._shown = self._held[end:], self._shown[end:]
        return text if all(shown) else "".join(c for c, is_shown in zip(text, shown, strict=True) if is_shown)


class SequenceText:
    """Text of new tokens, up to the first stop string.

    Args:
        detokenizer: decodes tokens.
        prompt: ids before the first new token.
        strings: stop strings.
        kept: special tokens that the text has although the detokenizer skips them, by their spelling.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt: Sequence[int],
        strings: Collection[str],
        kept: Collection[str] = (),
    ) -> None:
        self._detokenizer, self._pieces = detokenizer, detokenizer.incremental(prompt)
        self._stops, self._hidden = StopStrings(strings), detokenizer.skipped_in(strings)
        self._kept = detokenizer.skipped_in(kept) if kept else {}
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._given)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.found is not None

    def add(self, token: int, may_stop: bool = True) -> str:
        """The text that a token adds, which may be empty. No string ends the text without ``may_stop``."""
        if token in self._kept:
            piece = self._pieces.rest() + self._kept[token]
            return self._give(self._stops.add(piece) if may_stop else piece)
        if not may_stop:
            return "" if self._detokenizer.skips(token) else self._give(self._pieces.add(token))
        if token in self._hidden:
            before = self._stops.add(self._pieces.rest())
            return self._give(before + self._stops.add(self._hidden[token], hidden=True))
        if self._detokenizer.skips(token):
            return ""
        return self._give(self._stops.add(self._pieces.add(token)))

    def rest(self) -> str:
        """The text held back so far."""
        return self._give(self._stops.add(self._pieces.rest()) + self._stops.rest())

    def _give(self, piece: str) -> str:
        self._given.append(piece)
        return piece
