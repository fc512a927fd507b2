"""Attention over an engine's cache, for chunks of prompts and for one new token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from qcut.engine.decoder import HeadNorms, Scores, Tables
from qcut.engine.kv_cache.cache import KVCache


@dataclass(frozen=True)
class PromptAttention:
    """Attention of chunks of prompts: each token attends to what its sequence's cache holds up to it.

    Attributes:
        cache: keeps keys and values.
        tables: cosines and sines of each layer's positions, in the activations' dtype.
        positions: position of every token, int32 ``[B T]``.
        slots: place in the cache for each token's keys and values, int32 ``[B T]``.
        starts: tokens of each sequence before its chunk, int32 ``[B]``.
        lengths: tokens of each chunk, int32 ``[B]``, 0 to T.
    """

    raises_absmax: ClassVar[bool] = True

    cache: KVCache
    tables: Sequence[Tables]
    positions: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        norms: HeadNorms | None,
        absmax: Tensor | None,
    ) -> Tensor:
        """Heads side by side, ``[B T, queries * D]``, of queries, keys and values ``[B T, heads, D]``.

        ``absmax``, float32 ``[B T]``, is raised to the largest magnitudes of the result.
        """
        if norms is not None:
            q, k = norms(q, k)
        memory, rows = self.cache.layer(layer), len(q) // len(self.starts)
        places = (*self.tables[layer], self.positions, self.slots)
        guide, ring = self.cache.guide(layer), self.cache.ring(layer)
        torch.ops.qcut.append_kv(q, k, v, *places, *memory, rows, False, guide, ring)
        chunk = (self.starts, self.lengths, scores.scaling, rows, absmax, *scores[1:], ring)
        mixed: Tensor = torch.ops.qcut.prompt_attention(q, *memory, *chunk)
        return mixed.flatten(1)


@dataclass(frozen=True)
class StepAttention:
    """Attention of steps: one token of each sequence attends to the whole sequence, in one kernel.

    The kernel normalizes and rotates heads of queries and keys, stores keys and values in the cache, and attends.

    Attributes:
        cache: keeps keys and values.
        tables: cosines and sines of each layer's positions, in the activations' dtype.
        positions: position of each token, int32 ``[B]``.
        slots: place in the cache for each token's keys and values, int32 ``[B]``.
        counters: int32 ``[B queries]``, zero before and after every launch.
        reach: most places of a sequence that the kernels are chosen for; 0: those of the cache.
        others: reaches whose kernels are run beside, to be built and loaded; they do the same.
        settled: as in `qcut.ops.attention.decode.AppendAttention`.
    """

    raises_absmax: ClassVar[bool] = True

    cache: KVCache
    tables: Sequence[Tables]
    positions: Tensor
    slots: Tensor
    counters: Tensor
    reach: int = 0
    others: Sequence[int] = ()
    settled: bool = False

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        norms: HeadNorms | None,
        absmax: Tensor | None,
    ) -> Tensor:
        """Heads side by side, ``[B, queries * D]``, of queries, keys and values ``[B, heads, D]``.

        ``absmax``, float32 ``[B]``, is raised to the largest magnitudes of the result.
        """
        within = None if norms is None else norms.by_head(q.shape[2])
        if norms is not None and within is None:
            q, k = norms(q, k)
        step = (q, k, v, *self.tables[layer], self.positions, self.slots, *self.cache.layer(layer))
        options = (self.cache.guide(layer), *scores[1:], *(within or (None, None, 0.0)), self.cache.ring(layer))
        run = partial(torch.ops.qcut.append_attention, *step, scores.scaling, self.counters)
        for reach in self.others:
            run(None, *options, reach, self.settled)
        mixed: Tensor = run(absmax, *options, self.reach, self.settled)
        return mixed.flatten(1)
