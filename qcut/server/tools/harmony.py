"""The parser of GPT-OSS' answers: messages in channels."""

from __future__ import annotations

import re

from qcut.server.tools.pieces import Kind, Piece, cut

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MOST_HEAD = 512


class Harmony:
    """``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``.

    The channel ``analysis`` is reasoning, a message to ``functions.NAME`` is a call with its arguments as they are
    written, and everything else is content. A newline separates messages of one kind. A head that is cut off by the
    end of the answer is dropped.

    Args:
        calls: whether messages to functions are calls; otherwise they are content.
        reasoning: whether the analysis is reasoning; otherwise it is content.
    """

    def __init__(self, calls: bool = True, reasoning: bool = True) -> None:
        self._calls, self._reasoning = calls, reasoning
        self._held, self._is_head = "", True
        self._kind: Kind = "content"
        self._written: set[str] = set()  # kinds of earlier messages
        self._is_first = False  # whether nothing of the message has been sent

    def add(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._held += text
        found: list[Piece] = []
        before: tuple[bool, str] | None = None
        while self._held and before != (self._is_head, self._held):
            before = self._is_head, self._held
            found += self._read_head() if self._is_head else self._read_body()
        return found

    def end(self) -> list[Piece]:
        """See `Parser`."""
        held, self._held = self._held, ""
        is_cut = self._is_head and held.lstrip().startswith(MARKERS)
        return [] if is_cut or (self._is_head and not held.strip()) else self._of(held)

    def _read_head(self) -> list[Piece]:
        text = self._held.lstrip()
        if not any(head.startswith(text) or text.startswith(head) for head in _HEADS):
            return self._begin("content")
        head, marker, rest = cut(text, ("<|message|>",))
        if len(head) > _MOST_HEAD:
            self._held = text[_MOST_HEAD:]
            return [*self._begin("content"), *self._of(text[:_MOST_HEAD])]
        if marker is None:
            return []
        self._held = rest
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        function = re.search(r"\bto=functions\.([^\s<]+)", head)
        if function is not None and self._calls:
            return [*self._begin("arguments"), Piece("call", function[1])]
        is_analysis = channel is not None and channel[1] == "analysis" and function is None
        return self._begin("reasoning" if is_analysis and self._reasoning else "content")

    def _begin(self, kind: Kind) -> list[Piece]:
        self._kind, self._is_head, self._is_first = kind, False, True
        return []

    def _read_body(self) -> list[Piece]:
        before, marker, rest = cut(self._held, _ENDS)
        self._held = rest
        if marker is not None:
            self._is_head = True
            if marker in ("<|start|>", "<|channel|>"):
                self._held = marker + rest
        return self._of(before)

    def _of(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._is_first and self._kind != "arguments":
            text = "\n" * (self._kind in self._written) + text
            self._written.add(self._kind)
        self._is_first = False
        return [Piece(self._kind, text)]
