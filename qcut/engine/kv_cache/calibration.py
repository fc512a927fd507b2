"""KV calibration: statistics of a model's queries and keys, by which 4-bit keys are rounded.

The model reads given prompts, or else text of its own: `PROMPTS` sequences of up to `TOKENS` tokens, drawn at
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
from qcut.layers.tokens import RotationArguments
from qcut.numerics import int4
from qcut.numerics.sampling import Sampling

PROMPTS, TOKENS = 4, 512
"""Drawn sequences, and most tokens of each."""
SEED = 0
POSITIONS = 64
"""Positions of the context over which queries and keys with rotary positions are averaged."""


@dataclass
class Observer:
    """Attention of a prefill chunk that also sums statistics of queries and keys, normalized and not yet rotated.

    Attributes:
        inner: the attention.
        moments: of each layer, float64 ``[kv_heads, D, D]``: ``q q^T`` summed over the chunk's queries.
        keys: of each layer, float64 ``[kv_heads, D]``: the sum of its keys.
        rotates: of each layer, whether rotary positions come afterwards.
    """

    raises_absmax: ClassVar[bool] = PromptAttention.raises_absmax

    inner: PromptAttention
    moments: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    rotates: list[bool] = field(default_factory=list)

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
        """As `PromptAttention`, layers in order."""
        queries, keys, tables = q, k, self.inner.tables[layer]
        if norms is not None:
            queries, keys, tables = norms.at_positions(q, k, tables, self.inner.positions)
        lengths = self.inner.lengths
        index = torch.arange(len(q) // len(lengths), device=q.device, dtype=torch.int64)
        real = (index < lengths[:, None]).flatten()[:, None, None]
        rows = torch.where(real, queries, 0).double().unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 2)
        self.moments.append(rows.transpose(1, 2) @ rows)
        self.keys.append(torch.where(real, keys, 0).double().sum(0))
        self.rotates.append(tables[0] is not None)
        return self.inner(layer, q, k, v, scores, norms, absmax, rotation)


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
    """Text of the model's own: ids of a whole batch of sequences that fill the context."""
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


def calibrate_keys(runner: ModelRunner, prompts: list[Tensor], tables: Sequence[Tables]) -> list[Tensor]:
    """Calibration of each layer's keys, `qcut.numerics.int4.guide_of`, int32 on the host.

    Second moments and means are averages over `POSITIONS` positions of queries and keys. Columns that rotary positions
    rotate fast have no mean and no main direction.

    Args:
        runner: of the same model, over a cache of floats.
        prompts: ids ``[T]`` of each prompt.
        tables: cosines and sines ``[context, D]`` of each layer.

    Exactness: the same for the same prompts, device and versions of its libraries.
    """
    seen: list[Observer] = []
    for i in range(0, len(prompts), runner.batch):
        seen += runner.prefill_observed(prompts[i : i + runner.batch], Observer)
    count, found = sum(map(len, prompts)), []
    layers = zip(*([*zip(observer.moments, observer.keys, strict=True)] for observer in seen), strict=True)
    for parts, (cos, sin), rotates in zip(layers, tables, seen[0].rotates, strict=True):
        moments, keys = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        mean = keys / count
        if rotates and cos is not None and sin is not None:
            rotary = cos, sin
            moments = _at_positions(_at_positions(moments, rotary).transpose(2, 3), rotary, positioned=True).mean(0)
            mean = _at_positions(mean, rotary).mean(0)
        rotated = int4.rotate(int4.rotate(moments).transpose(1, 2))
        found.append(int4.guide_of(rotated, int4.rotate(mean)))
    return found


def _at_positions(x: Tensor, rotary: tuple[Tensor, Tensor], *, positioned: bool = False) -> Tensor:
    """Vectors float64 ``[..., D]`` rotated to `POSITIONS` positions of the context: ``[POSITIONS, ..., D]``.

    With ``positioned``, x has the first dimension already. Multiples of the golden ratio spread positions evenly over
    the context, in step with no wavelength.
    """
    context, device = len(rotary[0]), x.device
    fractions = torch.arange(POSITIONS, dtype=torch.int64, device="cpu").double() * ((5**0.5 - 1) / 2) % 1
    positions = (fractions * context).long().to(device)
    shape = (POSITIONS, *(1,) * (x.dim() - 1 - positioned), -1)
    c, s = (table[positions].double().view(shape) for table in rotary)
    low, high = x.chunk(2, -1)
    return x * c + torch.cat((-high, low), -1) * s
