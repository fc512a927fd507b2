"""Attention over an engine's cache, for whole prompts and for one new token of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.engine.kv_cache import KVCache


@dataclass(frozen=True)
class PromptAttention:
    """Attention of prompts: tokens attend to their own prompt, whose keys and values fill the cache from the start.

    Attributes:
        cache: keeps keys and values.
        cos: ``[context, D]`` in the activations' dtype, or None without rotary positions.
        sin: as ``cos``.
        positions: position of every token, int32 ``[batch T]``: 0 to T - 1 for each sequence.
        batch: number of sequences.
        first: index of the first of these sequences in the cache.
    """

    raises_absmax: ClassVar[bool] = False

    cache: KVCache
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor
    batch: int
    first: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, absmax: Tensor | None) -> Tensor:
        """Heads side by side, ``[batch T, queries * D]``, of queries, keys and values ``[batch T, heads, D]``."""
        length, places = len(q) // self.batch, self.positions
        memory = self.cache.layer(layer, self.first)
        torch.ops.qcut.append_kv(q, k, v, self.cos, self.sin, places, places, *memory, length)
        k, v = self.cache.read(layer, self.batch, length, self.first)
        q = q.unflatten(0, (self.batch, length)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(len(places), -1)


@dataclass(frozen=True)
class StepAttention:
    """Attention of steps: one token of each sequence attends to the whole sequence, in one kernel.

    The kernel rotates queries and keys, stores keys and values in the cache, and attends.

    Attributes:
        cache: keeps keys and values.
        cos: ``[context, D]`` in the activations' dtype, or None without rotary positions.
        sin: as ``cos``.
        positions: position of each token, int32 ``[B]``.
        slots: place in the cache for each token's keys and values, int32 ``[B]``.
        counters: int32 ``[B queries]``, zero before and after every launch.
    """

    raises_absmax: ClassVar[bool] = True

    cache: KVCache
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor
    slots: Tensor
    counters: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, absmax: Tensor | None) -> Tensor:
        """Heads side by side, ``[B, queries * D]``, of queries, keys and values ``[B, heads, D]``.

        ``absmax``, float32 ``[B]``, is raised to the largest magnitudes of the result.
        """
        step = (q, k, v, self.cos, self.sin, self.positions, self.slots, *self.cache.layer(layer))
        mixed: Tensor = torch.ops.qcut.append_attention(*step, scaling, self.counters, absmax)
        return mixed.flatten(1)
