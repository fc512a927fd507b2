"""Guides of 4-bit keys: what an engine learns of its model's queries and keys before it serves.

The model reads prompts that are given, or else text of its own: `PROMPTS` sequences of up to `TOKENS` tokens, drawn at
temperature 1 from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from qcut.engine.attention import PromptAttention
from qcut.engine.decoder import HeadNorms, Scores, Tables
from qcut.engine.runner import ModelRunner
from qcut.engine.sequence import Generated
from qcut.numerics import int4
from qcut.numerics.sampling import Sampling

PROMPTS, TOKENS = 4, 512
"""Sequences that are drawn, and tokens of each: fewer where the context is shorter."""
SEED = 0
PLACES = 64
"""Of the context, for which rows with rotary positions stand."""


@dataclass
class Watch:
    """Attention of a chunk of prompts that also adds up what guides are made of, before positions rotate it.

    Attributes:
        inner: the attention.
        moments: of each layer, float64 ``[kv_heads, D, D]``: ``q q^T`` summed over the chunk's queries.
        keys: of each layer, float64 ``[kv_heads, D]``: the sum of its keys.
    """

    raises_absmax: ClassVar[bool] = PromptAttention.raises_absmax

    inner: PromptAttention
    moments: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)

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
        """As `PromptAttention`, layers in order."""
        if norms is not None:
            q, k = norms(q, k)
        lengths = self.inner.lengths
        places = torch.arange(len(q) // len(lengths), device=q.device, dtype=torch.int64)
        real = (places < lengths[:, None]).flatten()[:, None, None]
        rows = torch.where(real, q, 0).double().unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 2)
        self.moments.append(rows.transpose(1, 2) @ rows)
        self.keys.append(torch.where(real, k, 0).double().sum(0))
        return self.inner(layer, q, k, v, scores, None, absmax)


class Generates(Protocol):
    """An engine over a cache of floats."""

    @property
    def batch(self) -> int:
        """Most sequences at once."""

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""

    def generate(self, prompts: Tensor, max_new_tokens: int, *, sampling: Sampling) -> list[Generated]:
        """Continue prompts."""


def drawn(reader: Generates, vocabulary: int) -> list[Tensor]:
    """Text of the model's own: ids of as many sequences as the reader takes, each of its whole context."""
    first = torch.randint(
        vocabulary, (reader.batch, 1), generator=torch.Generator().manual_seed(SEED), dtype=torch.int64, device="cpu"
    )
    if reader.context == 1:
        return list(first)
    found = reader.generate(first, reader.context - 1, sampling=Sampling(temperature=1.0, seed=SEED))
    return [
        torch.tensor([*start.tolist(), *each.tokens], dtype=torch.int64, device="cpu")
        for start, each in zip(first, found, strict=True)
    ]


def guides_of(runner: ModelRunner, prompts: list[Tensor], tables: Sequence[Tables]) -> list[Tensor]:
    """The guide of each layer, int32 on the host: see `qcut.numerics.int4.guide_of`.

    Queries and keys are taken to stand anywhere in the context: second moments and means are those of rows rotated to
    `PLACES` places of it. What rotary positions turn often has no mean, and no main direction.

    Args:
        runner: of the same model, over a cache of floats.
        prompts: ids ``[T]`` of each prompt.
        tables: cosines and sines ``[context, D]`` of all places, of each layer.

    Exactness: the same for the same prompts, device and versions of its libraries.
    """
    seen: list[Watch] = []
    for i in range(0, len(prompts), runner.batch):
        seen += runner.prefill_observed(prompts[i : i + runner.batch], Watch)
    count, found = sum(map(len, prompts)), []
    layers = zip(*([*zip(watch.moments, watch.keys, strict=True)] for watch in seen), strict=True)
    for parts, (cos, sin) in zip(layers, tables, strict=True):
        moments, keys = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        mean = keys / count
        if cos is not None and sin is not None:
            rotary = cos, sin
            moments = _anywhere(_anywhere(moments, rotary).transpose(2, 3), rotary, placed=True).mean(0)
            mean = _anywhere(mean, rotary).mean(0)
        turned = int4.turn(int4.turn(moments).transpose(1, 2))
        found.append(int4.guide_of(turned, int4.turn(mean)))
    return found


def _anywhere(rows: Tensor, rotary: tuple[Tensor, Tensor], *, placed: bool = False) -> Tensor:
    """Rows float64 ``[..., D]``, rotated to each of some places of the context: ``[PLACES, ..., D]``.

    With ``placed``, rows have a first dimension for the place already. The golden ratio's multiples spread places
    evenly over the context, and fall in step with no wavelength.
    """
    context, device = len(rotary[0]), rows.device
    places = (
        (torch.arange(PLACES, dtype=torch.int64, device="cpu").double() * ((5**0.5 - 1) / 2) % 1 * context)
        .long()
        .to(device)
    )
    shape = (PLACES, *(1,) * (rows.dim() - 1 - placed), -1)
    c, s = (table[places].double().view(shape) for table in rotary)
    low, high = rows.chunk(2, -1)
    return rows * c + torch.cat((-high, low), -1) * s
