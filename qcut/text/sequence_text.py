"""The text of a sequence while it is continued, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qcut.text.detokenizer import Detokenizer
from qcut.text.stops import Stops


class Transcript:
    """Pieces of text, one for each new token.

    Args:
        detokenizer: turns tokens into text.
        prompt: ids before the first new token.
        strings: end the text.

    Attributes:
        text: all pieces so far.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int], strings: Collection[str]) -> None:
        self._detokenizer, self._pieces = detokenizer, detokenizer.pieces(prompt)
        self._stops, self._hidden = Stops(strings), detokenizer.skipped_in(strings)
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._given)

    @property
    def stopped(self) -> bool:
        """Whether a string has ended the text."""
        return self._stops.found is not None

    def add(self, token: int, may_stop: bool = True) -> str:
        """The piece that a token adds, which may be empty. Strings that are complete before one may stop pass."""
        if not may_stop:
            return "" if self._detokenizer.skips(token) else self._give(self._pieces.add(token))
        if token in self._hidden:
            before = self._stops.add(self._pieces.rest())
            return self._give(before + self._stops.add(self._hidden[token], hidden=True))
        if self._detokenizer.skips(token):
            return ""
        return self._give(self._stops.add(self._pieces.add(token)))

    def rest(self) -> str:
        """What was held back, where no more tokens come."""
        return self._give(self._stops.add(self._pieces.rest()) + self._stops.rest())

    def _give(self, piece: str) -> str:
        self._given.append(piece)
        return piece
