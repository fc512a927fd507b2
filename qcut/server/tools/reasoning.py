"""The parser of reasoning between two markers."""

from __future__ import annotations

from qcut.server.tools.pieces import Parser, Piece, cut


class Think:
    """Reasoning at the beginning of an answer, up to a marker; all of the answer if that does not come.

    Newlines around the reasoning and before the content are dropped.

    Args:
        content: finds calls in the content after the reasoning.
        is_open: whether the prompt has begun the reasoning.
        markers: before and after the reasoning.
    """

    def __init__(
        self, content: Parser, is_open: bool = False, markers: tuple[str, str] = ("<think>", "</think>")
    ) -> None:
        self._content, self._held = content, ""
        self._open, self._close = markers
        self._state = "open" if is_open else "before"

    def add(self, text: str) -> list[Piece]:
        """See `Parser`."""
        if self._state == "content":
            return self._content.add(text)
        self._held += text
        found: list[Piece] = []
        if self._state in ("before", "open"):
            text = self._held.lstrip()
            if text.startswith(self._open):  # a model may repeat what the prompt has begun
                self._held, self._state = text[len(self._open) :], "start"
            elif self._open.startswith(text):
                return []
            else:
                self._state = "start" if self._state == "open" else "content"
        if self._state == "start":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "reasoning"
        if self._state == "reasoning":
            before, marker, self._held = cut(self._held, (self._close,))
            if marker is None:
                given = before.rstrip("\n")
                self._held = before[len(given) :] + self._held
            else:
                given, self._state = before.rstrip("\n"), "after"
            found += [Piece("reasoning", given)] if given else []
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "content"
        if self._state == "content":
            held, self._held = self._held, ""
            found += self._content.add(held)
        return found

    def end(self) -> list[Piece]:
        """See `Parser`."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return [Piece("reasoning", held)] if held.rstrip("\n") else []
        if self._state == "before":
            return [*self._content.add(held), *self._content.end()]
        if self._state == "open":
            return [Piece("reasoning", held.strip())] if held.strip() else []
        return self._content.end()
