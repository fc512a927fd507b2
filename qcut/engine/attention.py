"""Attention over the KV cache: of prefill chunks, and of one new token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from qcut.engine.decoder import HeadNorms, Scores, Tables
from qcut.engine.kv_cache.cache import KVCache
from qcut.layers.tokens import RotatedTokens, RotationArguments


@dataclass(frozen=True)
class PromptAttention:
    """Attention of prefill: each token attends to its sequence up to itself.

    Attributes:
        cache: the KV cache.
        tables: cosines and sines of each layer's positions, in the activations' dtype.
        positions: position of every token, int32 ``[B T]``.
        slots: position in the cache for each token's keys and values, int32 ``[B T]``.
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
        rotation: RotationArguments | None,
    ) -> Tensor:
        """See `qcut.engine.decoder.Attention`."""
        tables = self.tables[layer]
        if norms is not None:
            q, k, tables = norms.at_positions(q, k, tables, self.positions)
        memory, rows = self.cache.layer(layer), len(q) // len(self.starts)
        where = (*tables, self.positions, self.slots)
        calibration, ring = self.cache.calibration(layer), self.cache.ring(layer)
        torch.ops.qcut.append_kv(q, k, v, *where, *memory, rows, False, calibration, ring)
        chunk = (self.starts, self.lengths, scores.scaling, rows, absmax, scores.window, scores.softcap, ring)
        mixed: Tensor = torch.ops.qcut.prompt_attention(q, *memory, *chunk, sinks=scores.sinks)
        return mixed.flatten(1)


@dataclass(frozen=True)
class StepAttention:
    """Attention of decode: new tokens of each sequence attend to the whole sequence up to themselves, in one kernel.

    The kernel normalizes queries and keys, applies rotary positions, appends keys and values, and attends.

    Attributes:
        cache: the KV cache.
        tables: cosines and sines of each layer's positions, in the activations' dtype.
        positions: position of each token, int32 ``[B rows]``.
        slots: position in the cache for each token's keys and values, int32 ``[B rows]``.
        counters: int32 ``[B rows queries]``, zero before and after every launch.
        reach: ``max_seq_len`` bucket that the kernels are chosen for; 0: the cache's length.
        others: further buckets; their kernels run too, to be built and loaded, and compute the same.
        early_read: whether the promise of `qcut.ops.attention.decode.AppendAttentionOp` holds.
        rows: new tokens of each sequence.
    """

    raises_absmax: ClassVar[bool] = True

    cache: KVCache
    tables: Sequence[Tables]
    positions: Tensor
    slots: Tensor
    counters: Tensor
    reach: int = 0
    others: Sequence[int] = ()
    early_read: bool = False
    rows: int = 1

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        norms: HeadNorms | None,
        absmax: Tensor | None,
        rotation: RotationArguments | None,
    ) -> Tensor | RotatedTokens:
        """See `qcut.engine.decoder.Attention`."""
        within, tables = None if norms is None else norms.by_head(q.shape[2]), self.tables[layer]
        if norms is not None and within is None:
            q, k, tables = norms.at_positions(q, k, tables, self.positions)
        step = (q, k, v, *tables, self.positions, self.slots, *self.cache.layer(layer))
        normed, ring = within or (None, None, 0.0), self.cache.ring(layer)
        options = (self.cache.calibration(layer), scores.window, scores.softcap, *normed, ring)
        attend = torch.ops.qcut.append_attention
        overload = attend.early_read if self.early_read else attend.default
        run = partial(overload, *step, scores.scaling, self.counters, sinks=scores.sinks, rows=self.rows)
        if rotation is not None and rotation.out_dtype is q.dtype:  # int8 tokens have a scale that is of all heads
            operands, group_size, seeds = rotation[:3]
            run = partial(run, operands=operands, group_size=group_size, seeds=seeds)
        else:
            rotation = None
        for reach in self.others:
            run(None, *options, reach)
        mixed: Tensor = run(absmax, *options, self.reach)
        if rotation is not None:
            return RotatedTokens(mixed, mixed.new_empty(0, dtype=torch.float32), len(q), q.dtype)
        return mixed.flatten(1)
