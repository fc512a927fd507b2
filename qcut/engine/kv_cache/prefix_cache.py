"""Beginnings of sequences that a cache keeps, found again by their tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.engine.kv_cache.cache import KVCache

SHORTEST = 16
"""Fewer tokens are read again as fast as they are copied."""


class Found(NamedTuple):
    """The longest kept beginning of a prompt: its row in the cache, and its tokens, 0 where there is none."""

    row: int
    length: int


class Prefixes:
    """Keys and values of sequences that have been read; those not used for longest make room for new ones.

    Args:
        cache: of as many rows as sequences are kept. Rows are copied in and out.
        context: most tokens of a sequence.
    """

    def __init__(self, cache: KVCache | None, rows: int, context: int) -> None:
        self._cache = cache
        self._ids = torch.full((rows, context), -1, dtype=torch.int64, device="cpu")
        self._lengths = [0] * rows
        self._used = [0] * rows
        self._clock = 0

    @property
    def tokens(self) -> int:
        """Tokens that are kept."""
        return sum(self._lengths)

    @property
    def nbytes(self) -> int:
        """Memory for keys and values."""
        return 0 if self._cache is None else self._cache.nbytes

    def find(self, ids: Tensor) -> Found:
        """The longest kept beginning of ids int64 ``[T]``, at most T - 1 tokens: the last one gives the logits.

        A beginning is as long as what ids and a row have in common. Where rings have lost what would be seen after it,
        there is none, since shorter ones have lost more.
        """
        if self._cache is None or len(ids) <= SHORTEST:
            return Found(0, 0)
        common = self._in_common(ids[:-1]).tolist()
        lengths = [count if count >= self._cache.least(row) else 0 for row, count in enumerate(common)]
        row = max(range(len(lengths)), key=lengths.__getitem__)
        return Found(row, lengths[row]) if lengths[row] >= SHORTEST else Found(0, 0)

    def take(self, found: Found, cache: KVCache, row: int) -> None:
        """Copy a beginning to a row of another cache."""
        if found.length and self._cache is not None:
            cache.copy_row(self._cache, found.row, row, 0, found.length)
            self._use(found.row)

    def keep(self, ids: Tensor, cache: KVCache, row: int) -> None:
        """Keep ids int64 ``[T]``, whose keys and values are in a row of another cache.

        What begins the same, as far as it goes, gives way, unless rings have lost that beginning; what is there already
        is not copied.
        """
        if self._cache is None or not cache.least(row) <= len(ids) >= SHORTEST:
            return
        same = self._in_common(ids).tolist()
        inside = [i for i, count in enumerate(same) if self._cache.least(i) <= count == len(ids)]
        if inside:
            self._use(inside[0])
            return
        begins = [i for i, count in enumerate(same) if 0 < self._lengths[i] == count >= cache.least(row)]
        to = max(begins, key=same.__getitem__) if begins else min(range(len(same)), key=self._used.__getitem__)
        first = same[to] if begins else 0
        self._ids[to], self._lengths[to] = -1, 0  # nothing, until it has been copied
        self._cache.copy_row(cache, row, to, first, len(ids))
        self._ids[to, : len(ids)] = ids
        self._lengths[to] = len(ids)
        self._use(to)

    def forget(self) -> None:
        """Keep nothing."""
        self._ids.fill_(-1)
        self._lengths = [0] * len(self._lengths)

    def _in_common(self, ids: Tensor) -> Tensor:
        """Tokens from the first on that each row shares with ids."""
        return (self._ids[:, : len(ids)] == ids).long().cumprod(1).sum(1)

    def _use(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock
