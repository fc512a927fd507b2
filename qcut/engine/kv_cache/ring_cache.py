"""Rings: what a layer with a window keeps of a sequence, its last tokens.

A token sees its window. Once a ring is full, each token that comes takes the row of one that none will see, as long as
no sequence is taken back further than the ring has room for: `Ring.least` says how far.
"""

from __future__ import annotations

from dataclasses import dataclass

BESIDE = 1024
"""Default of tokens that a ring has room for beside a window."""


@dataclass(frozen=True)
class Ring:
    """Rows for the last tokens of a sequence: token p lies in row ``p % rows``, where token ``p - rows`` lay.

    Attributes:
        window: tokens that a token sees, its own the last.
        rows: of each sequence.
    """

    window: int
    rows: int

    @classmethod
    def of(cls, window: int, beside: int, context: int, head: int) -> Ring | None:
        """The ring of a layer; None where rows for the whole context are fewer, or a ring has no use.

        Args:
            window: of the layer; 0: tokens see all before them.
            beside: least `room`; 0: no layer has a ring.
            context: most tokens of a sequence.
            head: columns of a head. Kernels read prompts in blocks of up to 128 keys, or, of wider heads, 80, which
                rows are a multiple of.
        """
        block = 128 if head <= 128 else 640
        rows = -(-(window + beside - 1) // block) * block
        return cls(window, rows) if window and beside and rows <= context else None

    @property
    def room(self) -> int:
        """Tokens that may be written before the first of them is read: those before them, of its window, stay."""
        return self.rows - self.window + 1

    def least(self, written: int) -> int:
        """The fewest tokens after which a sequence can go on, of which some have been written: those it sees are there.

        Nothing is needed to begin anew, after 0.
        """
        return 0 if written <= self.rows else written - self.rows + self.window - 1
