"""The sliding-window (ring) KV cache: layers with a window store only the last tokens of a sequence.

A token attends to its window. Once a ring is full, each new token overwrites one outside of all windows, as long as no
sequence goes back further than the ring's slack: `Ring.least` says how far.
"""

from __future__ import annotations

from dataclasses import dataclass

SLACK = 1024
"""Default of tokens in a ring beyond the window."""


@dataclass(frozen=True)
class Ring:
    """Rows for the last tokens of a sequence: token p is in row ``p % rows``, where it overwrites token ``p - rows``.

    Attributes:
        window: tokens that a token attends to, its own the last.
        rows: of each sequence.
    """

    window: int
    rows: int

    @classmethod
    def of(cls, window: int, slack: int, context: int, head: int) -> Ring | None:
        """The ring of a layer; None if the context has fewer rows, or the layer has no window.

        Args:
            window: of the layer; 0: tokens attend to all before them.
            slack: least `room`; 0: no layer has a ring.
            context: most tokens of a sequence.
            head: columns of a head. Rows are a multiple of the blocks of keys in prefill kernels: up to 128, or, for
                wider heads, 80.
        """
        block = 128 if head <= 128 else 640
        rows = -(-(window + slack - 1) // block) * block
        return cls(window, rows) if window and slack and rows <= context else None

    @property
    def room(self) -> int:
        """Most tokens of a chunk: writing them leaves the window of the first one intact."""
        return self.rows - self.window + 1

    def least(self, written: int) -> int:
        """The fewest tokens, other than 0, after which a sequence of so many written tokens can go on."""
        return 0 if written <= self.rows else written - self.rows + self.window - 1
