"""Guides of 4-bit keys: what an engine learns of its model's queries and keys before it serves.

The model reads prompts that are given, or else text of its own: `PROMPTS` sequences of up to `TOKENS` tokens, drawn at
temperature 1 from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from qcut.engine.attention import PromptAttention
from qcut.engine.generated import Generated
from qcut.numerics import int4
from qcut.numerics.sampling import Sampling

PROMPTS, TOKENS = 4, 512
"""Sequences that are drawn, and tokens of each: fewer where the context is shorter."""
SEED = 0


@dataclass
class Watch:
    """Attention of a chunk of prompts that also adds up what guides are made of.

    Attributes:
        inner: the attention, over a cache of floats.
        moments: of each layer, float64 ``[kv_heads, D, D]``: ``q q^T`` summed over the chunk's turned queries.
        keys: of each layer, float64 ``[kv_heads, D]``: the sum of its turned keys.
    """

    raises_absmax: ClassVar[bool] = PromptAttention.raises_absmax

    inner: PromptAttention
    moments: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, absmax: Tensor | None) -> Tensor:
        """As `PromptAttention`, layers in order."""
        inner = self.inner
        mixed = inner(layer, q, k, v, scaling, absmax)  # rotates q, and keeps k rotated
        sequences, kept = len(inner.starts), inner.cache.layer(layer)[0]
        rows = len(q) // sequences
        places = torch.arange(rows, device=q.device)
        real = (places < inner.lengths[:, None]).flatten()
        owner = torch.arange(sequences, device=q.device).repeat_interleave(rows)
        stored = kept[owner, :, inner.slots.long()]  # [T, kv_heads, D]
        turned = torch.where(real[:, None, None], int4.turn(q), 0.0).double()
        grouped = turned.unflatten(1, (stored.shape[1], -1)).transpose(0, 1).flatten(1, 2)
        self.moments.append(grouped.transpose(1, 2) @ grouped)
        self.keys.append(torch.where(real[:, None, None], int4.turn(stored), 0.0).double().sum(0))
        return mixed


class Reader(Protocol):
    """What an engine over a cache of floats does for this module."""

    @property
    def batch(self) -> int:
        """Most sequences at once."""

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""

    def generate(self, prompts: Tensor, max_new_tokens: int, *, sampling: Sampling) -> list[Generated]:
        """Continue prompts."""

    def watched(self, prompts: list[Tensor], watch: Callable[[PromptAttention], Watch]) -> list[Watch]:
        """Read prompts; what watched the attention of each chunk."""


def drawn(reader: Reader, vocabulary: int) -> list[Tensor]:
    """Text of the model's own: ids of as many sequences as the reader takes, each of its whole context."""
    first = torch.randint(vocabulary, (reader.batch, 1), generator=torch.Generator().manual_seed(SEED))
    if reader.context == 1:
        return list(first)
    found = reader.generate(first, reader.context - 1, sampling=Sampling(temperature=1.0, seed=SEED))
    return [torch.tensor([*start.tolist(), *each.tokens]) for start, each in zip(first, found, strict=True)]


def guides_of(reader: Reader, prompts: list[Tensor]) -> list[Tensor]:
    """The guide of each layer, int32 on the host: see `qcut.numerics.int4.guide_of`.

    Args:
        reader: an engine over the same model with a cache of floats.
        prompts: ids ``[T]`` of each prompt.

    Exactness: the same for the same prompts, device and versions of its libraries.
    """
    seen: list[Watch] = []
    for i in range(0, len(prompts), reader.batch):
        seen += reader.watched(prompts[i : i + reader.batch], Watch)
    count = sum(map(len, prompts))
    moments = (torch.stack(parts).sum(0) for parts in zip(*(watch.moments for watch in seen), strict=True))
    keys = (torch.stack(parts).sum(0) for parts in zip(*(watch.keys for watch in seen), strict=True))
    return [int4.guide_of(moment, total / count) for moment, total in zip(moments, keys, strict=True)]
