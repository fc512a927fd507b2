"""Attention of chunks of prompts over a cache that holds them and what came before."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import RangeError, ShapeError
from qcut.numerics import int8
from qcut.ops.attention.cache import (
    Cache,
    attended,
    check_cache,
    check_queries,
    check_ring,
    check_scores,
    check_sinks,
    seen,
    unrolled,
)
from qcut.ops.checks import S32, check_absmax, check_indices, check_tensor
from qcut.ops.registry import MUTATED, operator


@operator("prompt_attention", returns="Tensor")
class PromptAttentionOp(NamedTuple):
    """Attention of a chunk of new tokens of each sequence to what its cache holds up to each of them.

    Query ``t = b * length + i`` is token i of sequence b's chunk, at place ``starts[b] + i`` of the cache::

        y[t, h] = softmax_p(scale * q[t, h] . K[b, h // group, p]) . V[b, h // group, p]    p from 0 to starts[b] + i

    for ``i < lengths[b]``, and 0 for the rest, with ``group = heads / kv_heads``. K and V of an int8 cache are
    ``f32(keys) * key_scales`` and ``f32(values) * value_scales``. The chunk's own keys and values are in the cache.
    With a window, p is above ``starts[b] + i - window``; with a softcap, a score s is ``softcap * tanh(s / softcap)``.
    Sinks are as in `qcut.ops.attention.decode.DecodeAttentionOp`: rows past a chunk's tokens stay 0.

    Args:
        q: rotated queries, float16, bfloat16 or float32 ``[T, heads, head]``, heads of a token side by side, any stride
            between tokens.
        keys: ``[S, kv_heads, context, head]`` of q's type or int8, contiguous, S at least ``T / length``, kv_heads a
            divisor of heads.
        values: as ``keys``.
        key_scales: as in `qcut.ops.attention.cache.Cache`.
        value_scales: as ``key_scales``.
        starts: int32 ``[T / length]``, tokens of each sequence before its chunk.
        lengths: int32 ``[T / length]``, tokens of each chunk, 0 to ``length``; ``starts + lengths`` is at most
            ``context``. CUDA takes the nearest allowed start, then the nearest allowed length.
        scale: multiplies scores.
        length: rows of q for each sequence; T is a multiple.
        absmax: float32 ``[T]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.
        window: places that a query sees, its own the last; 0: all up to its own.
        softcap: bound of scores; 0: none.
        ring: as in `qcut.ops.attention.decode.AppendKvOp`: ``starts + lengths`` is at most ``ring``, the window is 1 or
            more, and a chunk fits: ``window + length - 1`` is at most ``context``.
        sinks: as in `qcut.ops.attention.decode.DecodeAttentionOp`.

    Returns:
        y ``[T, heads, head]`` of q's type, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above, or ``length`` does not divide T.
        ConfigError: scales that do not go with the cache's type, a negative window, softcap or ring, or a ring without
            a window.
        RangeError: a start or length out of range, on the CPU.

    Exactness: that of float32 scores and sums, in an order that the device and the sizes decide. Kernels for 16-bit
    queries round the weights to q's type; elsewhere K and V of an int8 cache are rounded to q's type, and with sinks
    only the result is. A row does not depend on other rows, nor on what the cache holds past its chunk, nor, where that
    is finite, on what it holds past the row or before its window. On CUDA, starts and lengths are read only by the
    kernel: a CUDA graph may be replayed with others. Results over a ring are bitwise those without, but on CUDA where
    ``context`` is no multiple of the keys that a kernel reads at once, 128, 80 or a part of 128: that is torch's
    attention then.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    starts: Tensor
    lengths: Tensor
    scale: float
    length: int
    absmax: Annotated[Tensor | None, MUTATED] = None
    window: int = 0
    softcap: float = 0.0
    ring: int = 0
    sinks: Tensor | None = None

    @property
    def cache(self) -> Cache:
        """Keys and values to read."""
        return Cache(*self[1:5])

    def check(self) -> None:
        op, q = "prompt_attention", self.q
        count, _ = check_queries(op, q)
        if self.length < 1 or count % self.length:
            raise ShapeError(f"qcut::{op}: {count} tokens, {self.length} of each sequence; allowed: whole sequences")
        sequences = count // self.length
        check_cache(op, q, self.cache, sequences)
        check_tensor(op, "starts", self.starts, S32, (sequences,), q.device)
        check_tensor(op, "lengths", self.lengths, S32, (sequences,), q.device)
        check_absmax(op, "absmax", self.absmax, q)
        check_scores(op, self.window, self.softcap)
        check_ring(op, self.ring, self.keys.shape[2], self.length, self.window)
        check_sinks(op, self.sinks, q)

    def fake(self) -> Tensor:
        return self.q.new_empty(self.q.shape)

    def cpu(self) -> Tensor:
        q, cache, context = self.q, self.cache, self.ring or self.keys.shape[2]
        check_indices("qcut::prompt_attention", "starts", self.starts, context + 1)
        check_indices("qcut::prompt_attention", "lengths", self.lengths, self.length + 1)
        if self.ring:
            cache = unrolled(cache, context)
        y = q.new_zeros(q.shape)
        for b, (start, tokens) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            end, first = start + tokens, b * self.length
            if end > context:
                raise RangeError(
                    f"qcut::prompt_attention: sequence {b} has {tokens} tokens after {start}; allowed: {context} in all"
                )
            if tokens == 0:
                continue
            places = torch.arange(end, device=q.device, dtype=torch.int64)
            mask = seen(places, places[start:, None], self.window)
            rows = q[first : first + tokens].transpose(0, 1)[None]
            mixed = attended(rows, cache, b, 1, end, mask, self.scale, self.softcap, self.sinks)
            y[first : first + tokens] = mixed[0].transpose(0, 1)
        int8.raise_absmax(self.absmax, y)
        return y
