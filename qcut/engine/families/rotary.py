"""Rotary positions as the engine's kernels apply them: column i of a head is rotated with column i + D / 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcut.engine.decoder import Heads, Rotary
from qcut.errors import UnsupportedError

_TYPES = ("default", "linear", "llama3", "yarn", "ntk_alpha", "dynamic", "longrope")
"""Frequencies of the last two depend on the length only past the context that `context_of` allows."""


@dataclass(frozen=True)
class PartialRotary:
    """Rotary positions of only the first columns of each head, in the order of `column_order`: others are kept.

    Attributes:
        rotary: makes cosines and sines of the rotated columns.
        head_size: columns of a head.
    """

    rotary: Rotary
    head_size: int

    def __call__(self, example: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[1, T, head_size]``."""
        cos, sin = self.rotary(example, positions)
        kept = (self.head_size - cos.shape[-1]) // 2
        return self._filled(cos, cos.new_ones(kept)), self._filled(sin, sin.new_zeros(kept))

    def _filled(self, table: Tensor, kept: Tensor) -> Tensor:
        low, high = table.chunk(2, -1)
        rest = kept.expand(*table.shape[:-1], -1)
        return torch.cat((low, rest, high, rest), -1)


def rotary_of(model: Any, module: Any, heads: Heads, layer_type: str | None = None) -> tuple[Rotary, int]:
    """A model's rotary positions, and the number of a head's columns that they rotate.

    Args:
        model: names the error.
        module: the model's own module for rotary positions.
        heads: the model's.
        layer_type: of the layers, if each type has frequencies of its own.

    Raises:
        UnsupportedError: frequencies that the engine does not know, or more of them than a head has pairs of columns.
    """
    kind, prefix = getattr(module, "rope_type", "default"), ""
    if layer_type is not None and isinstance(kind, dict):
        kind, prefix = kind[layer_type], f"{layer_type}_"
    if kind not in _TYPES:
        allowed = ", ".join(_TYPES)
        raise UnsupportedError(f"{type(model).__name__}: rotary positions of type {kind!r}; allowed: {allowed}")
    rotated = 2 * getattr(module, f"{prefix}inv_freq").numel()
    if rotated > heads.size:
        name = type(model).__name__
        raise UnsupportedError(f"{name}: positions rotate {rotated} columns of heads of {heads.size}; allowed: no more")
    rotary = partial(module, layer_type=layer_type) if prefix else module
    return (rotary if rotated == heads.size else PartialRotary(rotary, heads.size)), rotated


def context_of(config: Any) -> int:
    """Most tokens of a context with rotary frequencies that do not depend on its length."""
    rope, most = getattr(config, "rope_parameters", None) or {}, int(config.max_position_embeddings)
    own = getattr(config, "original_max_position_embeddings", None)
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") == "longrope":
            most = min(most, each.get("original_max_position_embeddings") or own or most)
    return most


def column_order(
    heads: Heads, rotated: int, starts: Sequence[int], device: torch.device, interleaved: bool = False
) -> Tensor | None:
    """Columns of a projection in the order of `Heads.split`, rotated pairs half a head apart; None: they are so.

    Args:
        heads: heads of a token.
        rotated: first columns of each query and key, which positions rotate; pairs are ``rotated / 2`` apart.
        starts: first column of each head: of queries, then keys, then values.
        device: of the result.
        interleaved: whether pairs are neighbours instead.
    """
    size, half = heads.size, rotated // 2
    kept = (size - rotated) // 2
    first, second = range(half), range(half, rotated)
    if interleaved:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    lows = [*first, *range(rotated, rotated + kept)]
    highs = [*second, *range(rotated + kept, size)]
    order = []
    for i, start in enumerate(starts):
        columns = [*lows, *highs] if i < heads.queries + heads.keys else range(size)
        order += [start + column for column in columns]
    return None if order == [*range(len(order))] else torch.tensor(order, device=device, dtype=torch.int64)
