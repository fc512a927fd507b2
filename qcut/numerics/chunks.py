"""Weights in pieces, so that no float32 copy of a whole weight exists."""

from __future__ import annotations

from collections.abc import Iterator

ELEMENTS = 1 << 24
"""Elements of a piece."""


def row_chunks(n: int, k: int, elements: int | None = None) -> Iterator[slice]:
    """Slices of the rows of ``[n, k]``, each of at most ``elements`` elements or of a single row."""
    rows = max(1, (ELEMENTS if elements is None else elements) // k)
    return (slice(first, min(first + rows, n)) for first in range(0, n, rows))
