"""Chunked prefill: a chunk has up to T tokens of each of S sequences, T and S of a short list of sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def size_for(count: int, doubling: int = 64) -> int:
    """The least size from ``count`` up: a power of two to ``doubling``, then one of four to an octave, if whole.

    Few sizes need few graphs. Tokens double up to 64, where loading the weights takes most of the time: 1, 2, 4 to 64,
    80, 96, 112, 128, 160. Sequences, which multiply tokens, do not double: 1 to 8, 10, 12, 14, 16, 20. Padding is then
    less than a quarter of either.
    """
    octave = 1 << max(0, count - 1).bit_length()
    step = max(1, octave // 8) if octave > doubling else octave
    return -(-count // step) * step


def size_within(limit: int) -> int:
    """The largest size of tokens up to ``limit``, which is at least 1."""
    octave = 1 << (limit.bit_length() - 1)
    step = octave // 4 if octave >= 64 else octave
    return limit // step * step


class Span(NamedTuple):
    """The tokens of each prompt in a chunk.

    Attributes:
        firsts: index of the first for each prompt.
        counts: number of tokens of each prompt; 0 before its first chunk.
    """

    firsts: list[int]
    counts: list[int]


def spans(lengths: Sequence[int], most: int) -> Iterator[Span]:
    """Divide prompts into chunks of at most so many tokens of each, so that all prompts end in the last chunk."""
    for left in range(-(-max(lengths) // most) - 1, -1, -1):
        firsts = [max(0, length - (left + 1) * most) for length in lengths]
        ends = [max(0, length - left * most) for length in lengths]
        yield Span(firsts, [end - first for first, end in zip(firsts, ends, strict=True)])


class Chunk:
    """Memory on the device that describes a chunk: up to T tokens of each of S sequences.

    One copy from the host fills it. A CUDA graph that reads it serves every chunk of this size.

    Args:
        sequences: S.
        tokens: T.
        context: most tokens of a sequence; keys and values of padding go to the position after it.
        device: of the memory.

    Attributes:
        ids: token ids, int64 ``[S, T]``; padding has some id.
        starts: int32 ``[S]``, tokens of each sequence before this chunk.
        lengths: int32 ``[S]``, tokens in this chunk, 0 to T.
        graph: the graph that reads this memory, once there is one.
    """

    def __init__(self, sequences: int, tokens: int, context: int, device: torch.device) -> None:
        self.sequences, self.tokens, self._context = sequences, tokens, context
        count = sequences * tokens
        self._given = torch.zeros(count + sequences, dtype=torch.int64, device=device)
        self.ids, self.starts, self.lengths = self._parts(self._given)
        self._index = torch.arange(tokens, dtype=torch.int32, device=device)
        self._firsts = torch.arange(0, count, tokens, dtype=torch.int32, device=device)
        self.graph: Any = None

    def fill(self, prompts: Sequence[Tensor], starts: Sequence[int], span: Span) -> None:
        """Describe a span of prompts.

        Args:
            prompts: int64 ``[length]`` each, on the host, at most S.
            starts: tokens of each sequence before its prompt.
            span: tokens of the prompts.
        """
        # Memory of its own for each copy: the device may be about to read the last one.
        host = torch.zeros(self._given.shape, dtype=torch.int64, pin_memory=self._given.is_cuda, device="cpu")
        ids, befores, lengths = self._parts(host)
        for row, prompt, first, count in zip(ids, prompts, *span, strict=False):
            row[:count] = prompt[first : first + count]
        n = len(prompts)
        befores[:n] = torch.tensor(
            [start + first for start, first in zip(starts, span.firsts, strict=True)], dtype=torch.int64, device="cpu"
        )
        lengths[:n] = torch.tensor(span.counts, dtype=torch.int64, device="cpu")
        self._given.copy_(host, non_blocking=True)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Position of each token, and its position in the KV cache, int32 ``[S T]``."""
        positions = self.starts[:, None] + self._index
        slots = positions.masked_fill(self._index >= self.lengths[:, None], self._context)
        return positions.clamp(max=self._context - 1).flatten(), slots.flatten()

    def last_tokens(self) -> Tensor:
        """Index in ``[S T]`` of each sequence's last token; of its first position if it has no tokens."""
        return self._firsts + (self.lengths - 1).clamp(min=0)

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = self.sequences * self.tokens
        starts, lengths = memory[count:].view(torch.int32).view(2, self.sequences)
        return memory[:count].view(self.sequences, self.tokens), starts, lengths
