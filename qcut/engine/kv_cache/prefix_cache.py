"""The prefix cache: keys and values of earlier sequences, found again by their tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.engine.kv_cache.cache import KVCache

SHORTEST = 16
"""Shorter prefixes take as long to copy as to prefill."""


class Match(NamedTuple):
    """The longest cached prefix of a prompt: its slot in the prefix cache, and its tokens, 0 if there is none."""

    slot: int
    length: int


class PrefixCache:
    """Keys and values of sequences; the least recently used make room for new ones.

    Args:
        cache: copies of the sequences' keys and values; None: nothing is cached.
        slots: of ``cache``.
        context: most tokens of a sequence.
    """

    def __init__(self, cache: KVCache | None, slots: int, context: int) -> None:
        self._cache = cache
        self._ids = torch.full((slots, context), -1, dtype=torch.int64, device="cpu")
        self._lengths = [0] * slots
        self._used = [0] * slots
        self._clock = 0

    @property
    def tokens(self) -> int:
        """Cached tokens."""
        return sum(self._lengths)

    @property
    def nbytes(self) -> int:
        """Memory for keys and values."""
        return 0 if self._cache is None else self._cache.nbytes

    def find(self, ids: Tensor) -> Match:
        """The longest cached prefix of ids int64 ``[T]``, at most T - 1 tokens: the last one gives the logits.

        A slot does not match if its ring has dropped tokens that a window after the common prefix would see; shorter
        prefixes of it have lost more.
        """
        if self._cache is None or len(ids) <= SHORTEST:
            return Match(0, 0)
        common = self._common(ids[:-1]).tolist()
        lengths = [count if count >= self._cache.least(slot) else 0 for slot, count in enumerate(common)]
        slot = max(range(len(lengths)), key=lengths.__getitem__)
        return Match(slot, lengths[slot]) if lengths[slot] >= SHORTEST else Match(0, 0)

    def copy_to(self, match: Match, cache: KVCache, slot: int) -> None:
        """Copy a prefix to a slot of another cache."""
        if match.length and self._cache is not None:
            cache.copy_sequence(self._cache, match.slot, slot, 0, match.length)
            self._use(match.slot)

    def insert(self, ids: Tensor, cache: KVCache, slot: int) -> None:
        """Copy a sequence of ids int64 ``[T]`` from a slot of another cache.

        Entries that are a prefix of the new one are evicted, unless the ring cache has dropped that prefix. Tokens that
        the slot shares with an evicted entry are not copied.
        """
        if self._cache is None or not cache.least(slot) <= len(ids) >= SHORTEST:
            return
        common = self._common(ids).tolist()
        holding = [i for i, count in enumerate(common) if self._cache.least(i) <= count == len(ids)]
        if holding:
            self._use(holding[0])
            return
        prefixes = [i for i, count in enumerate(common) if 0 < self._lengths[i] == count >= cache.least(slot)]
        to = max(prefixes, key=common.__getitem__) if prefixes else min(range(len(common)), key=self._used.__getitem__)
        first = common[to] if prefixes else 0
        self._ids[to], self._lengths[to] = -1, 0  # empty until it has been copied
        self._cache.copy_sequence(cache, slot, to, first, len(ids))
        self._ids[to, : len(ids)] = ids
        self._lengths[to] = len(ids)
        self._use(to)

    def clear(self) -> None:
        """Evict everything."""
        self._ids.fill_(-1)
        self._lengths = [0] * len(self._lengths)

    def _common(self, ids: Tensor) -> Tensor:
        """Length of the prefix that each slot shares with ids."""
        return (self._ids[:, : len(ids)] == ids).long().cumprod(1).sum(1)

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
