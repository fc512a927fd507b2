"""A decoder's attention over a cache of keys and values: filling the cache, reading it, and both in one step."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int4, int8
from qcut.ops.attention.cache import (
    Cache,
    attended,
    check_cache,
    check_heads,
    check_queries,
    check_ring,
    check_scores,
    check_sinks,
    seen,
    unrolled,
)
from qcut.ops.checks import S32, check_absmax, check_dtype, check_indices, check_tensor
from qcut.ops.codebook import RotateTokensOp, check_rotated
from qcut.ops.registry import MUTATED, operator

MAX_SEQUENCES = 65_535
"""Sequences that one launch attends for: the z extent of a CUDA grid."""


class Tokens(NamedTuple):
    """New tokens of some sequences.

    Attributes:
        q: queries ``[T, heads, head]``.
        k: keys ``[T, kv_heads, head]``.
        v: values ``[T, kv_heads, head]``.
        cos: cosines of rotary positions ``[positions, head]``; None: positions are not rotary.
        sin: sines of rotary positions, as ``cos``.
        positions: int32 ``[T]``, the row of ``cos`` and ``sin`` for each token.
        slots: int32 ``[T]``, the place in the cache for each token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor
    slots: Tensor

    @property
    def rotary(self) -> tuple[Tensor, ...]:
        """Cosines and sines where positions are rotary."""
        return () if self.cos is None or self.sin is None else (self.cos, self.sin)


@operator("append_kv", returns="()")
class AppendKvOp(NamedTuple):
    """Rotates the queries of new tokens in place, and stores their rotated keys and their values in the cache.

    With 4-bit keys, queries are then Hadamard-rotated too (`qcut.numerics.int4.rotate`) and rounded to their type.

    Token t belongs to sequence ``t // length``. Queries and keys are rotated alike, head by head, rne rounding to the
    nearest value of the type::

        halves       p[i] = -x[i + head / 2], p[i + head / 2] = x[i]    for i < head / 2
        interleaved  p[2 i] = -x[2 i + 1],    p[2 i + 1] = x[2 i]       for i < head / 2
        x = rne(rne(x * cos[positions[t]]) + rne(p * sin[positions[t]]))

    Args:
        q: float16, bfloat16 or float32 ``[T, heads, head]``, heads of a token side by side, any stride between tokens;
            rotated in place; unchanged without cosines and 4-bit keys.
        k: ``[T, kv_heads, head]`` of q's type, heads of a token side by side.
        v: as k.
        cos: ``[positions, head]`` of q's type, alike for both columns of a pair; None: positions are not rotary.
        sin: as ``cos``.
        positions: int32 ``[T]``, rows of ``cos`` and ``sin``; CUDA does not check them.
        slots: int32 ``[T]``, places in the cache, each below ``context``. CUDA stores nothing of a token with a
            place outside the cache.
        keys: as in `qcut.ops.attention.cache.Cache`, S at least ``T / length``; written.
        values: as ``keys``.
        key_scales: as in `qcut.ops.attention.cache.Cache`, written.
        value_scales: as ``key_scales``.
        length: tokens of each sequence; T is a multiple.
        interleaved: pairs are neighbouring columns, as GPT-J has them, not halves, as Llama has them.
        guide: int32 ``[kv_heads, head + 2, 4]``, contiguous, by which 4-bit keys are rounded
            (`qcut.numerics.int4.guide_of`); None: each code is the nearest.
        ring: places of a sequence, if the cache is a ring: what belongs to place p lies in row ``p % context``.
            ``slots`` are below ``ring``, or ``ring`` for a token that is not stored; ``length`` is at most ``context``.
            0: the cache is none, and has a row for each place.

    Raises:
        DtypeError, ShapeError, DeviceError: a tensor is not as above, ``length`` does not divide T or is beyond a ring.
        ConfigError: cosines without sines, scales that do not go with the cache's type, or a negative ring.
        RangeError: a place or position out of range, on the CPU.

    Exactness: bitwise; int8 rows and scales are `qcut.numerics.int8.quantize_per_token_ref` of a head, 4-bit rows and
    words `qcut.numerics.int4.quantize_rows_ref` of a Hadamard-rotated head, keys by the guide.
    """

    q: Annotated[Tensor, MUTATED]
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor
    slots: Tensor
    keys: Annotated[Tensor, MUTATED]
    values: Annotated[Tensor, MUTATED]
    key_scales: Annotated[Tensor | None, MUTATED]
    value_scales: Annotated[Tensor | None, MUTATED]
    length: int = 1
    interleaved: bool = False
    guide: Tensor | None = None
    ring: int = 0

    @property
    def tokens(self) -> Tokens:
        """Queries, keys and values, and their places."""
        return Tokens(*self[:7])

    @property
    def cache(self) -> Cache:
        """Keys and values to write."""
        return Cache(*self[7:11])

    def check(self) -> None:
        _check_tokens("append_kv", self.tokens, self.cache, self.length)
        _check_guide("append_kv", self.guide, self.k, self.cache)
        check_ring("append_kv", self.ring, self.keys.shape[2], self.length)

    def fake(self) -> None:
        return None

    def cpu(self) -> None:
        tokens, cache = self.tokens, self.cache
        q, k = tokens.q, tokens.k
        context = cache.keys.shape[2]
        check_indices("qcut::append_kv", "slots", tokens.slots, self.ring + 1 if self.ring else context)
        if tokens.rotary:
            check_indices("qcut::append_kv", "positions", tokens.positions, min(map(len, tokens.rotary)))
            cos, sin = (table[tokens.positions.long(), None] for table in tokens.rotary)
            q.copy_(_rotated(q, cos, sin, self.interleaved))
            k = _rotated(k, cos, sin, self.interleaved)
        if cache.has_rotated_keys:
            q.copy_(int4.rotate(q))
        sequences, places, v = (
            torch.arange(len(q), device=q.device, dtype=torch.int64) // self.length,
            tokens.slots.long(),
            tokens.v,
        )
        if self.ring:
            kept = places < self.ring
            sequences, places, k, v = sequences[kept], places[kept] % context, k[kept], v[kept]
        for stored, scales, rows in ((cache.keys, cache.key_scales, k), (cache.values, cache.value_scales, v)):
            if scales is None:
                stored[sequences, :, places] = rows
                continue
            flat = rows.reshape(-1, rows.shape[2])
            if stored.dtype is torch.uint8:
                guide = self.guide if stored is cache.keys else None
                codes, scale = int4.quantize_rows_ref(int4.rotate(flat), guide)
            else:
                codes, scale = int8.quantize_per_token_ref(flat, flat.shape[1])
            stored[sequences, :, places] = codes.view(*rows.shape[:2], stored.shape[3])
            scales[sequences, :, places] = scale.view(rows.shape[:2])


@operator("decode_attention", returns="Tensor")
class DecodeAttentionOp(NamedTuple):
    """Attention of one query of each sequence to the keys and values that its cache holds up to its position.

    ``y[b, h] = softmax_t(scale * q[b, h] . K[b, h // group, t]) . V[b, h // group, t]`` for t from 0 to
    ``positions[b]``, with ``group = heads / kv_heads``; K and V of an int8 cache are ``f32(keys) * key_scales`` and
    ``f32(values) * value_scales``. With a window, t is above ``positions[b] - window``; with a softcap, a score s is
    ``softcap * tanh(s / softcap)``. With sinks, the softmax of head h has one more term ``exp(sinks[h])`` in its sum,
    which weighs no value: ``scale`` and softcap do not change sinks, and every window has its sink.

    Args:
        q: float16, bfloat16 or float32 ``[B, heads, head]``, heads side by side, B to 65,535.
        keys: as in `qcut.ops.attention.cache.Cache`, S at least B, kv_heads a divisor of
            heads.
        values: as ``keys``.
        key_scales: as in `qcut.ops.attention.cache.Cache`.
        value_scales: as ``key_scales``.
        positions: int32 ``[B]``, each below ``context``; CUDA takes the nearest of those for another.
        scale: multiplies scores.
        counters: int32 of at least ``B * heads`` zeros for the kernel to count with, which leaves zeros; None: the
            operator has its own. Two launches that may run at the same time need counters of their own. In the capture
            of a CUDA graph, counters given spare the graph a memset.
        window: places that a query sees, its own the last; 0: all up to its own.
        softcap: bound of scores; 0: none.
        ring: as in `AppendKvOp`; ``positions`` are below ``ring``, and the window, 1 or more, is at most ``context``.
        reach: most places of a sequence that this call is made fast for, its own last one included; 0: as many as the
            cache has. Sequences that are longer are read as well, as far as they go, in more time.
        sinks: float32 ``[heads]``, contiguous, finite or minus infinity, which is none; None: no head has one.

    Returns:
        y ``[B, heads, head]`` of q's type, contiguous.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: scales that do not go with the cache's type, a negative window, softcap or ring, a ring without
            a window, or a reach below 0 or beyond the places.
        RangeError: a position out of range, on the CPU.

    Exactness: that of float32 scores, softcaps within ``2**-20`` of themselves, and sums, in an order that the
    device, B and ``context``, or a window or reach below it, decide: results over a ring are bitwise those without, and
    results with a reach bitwise those over a cache of so many places, unless a window is as wide. Kernels for
    16-bit queries round the weights to q's type; the CPU rounds K and V of an int8 cache to q's type, and with sinks
    only the result. Each device gives the same bits for the same sizes.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    positions: Tensor
    scale: float
    counters: Annotated[Tensor | None, MUTATED] = None
    window: int = 0
    softcap: float = 0.0
    ring: int = 0
    reach: int = 0
    sinks: Tensor | None = None

    @property
    def cache(self) -> Cache:
        """Keys and values to read."""
        return Cache(*self[1:5])

    def check(self) -> None:
        op, q = "decode_attention", self.q
        sequences, _ = check_queries(op, q)
        check_cache(op, q, self.cache, sequences)
        check_tensor(op, "positions", self.positions, S32, (sequences,), q.device)
        _check_launch(op, q, self.counters)
        check_scores(op, self.window, self.softcap)
        check_ring(op, self.ring, self.keys.shape[2], 1, self.window)
        _check_reach(op, self.reach, self.ring or self.keys.shape[2])
        check_sinks(op, self.sinks, q)

    def fake(self) -> Tensor:
        return self.q.new_empty(self.q.shape)

    def cpu(self) -> Tensor:
        q, positions, cache = self.q, self.positions, self.cache
        check_indices("qcut::decode_attention", "positions", positions, self.ring or cache.keys.shape[2])
        longest = int(positions.max()) + 1 if len(q) else 0
        if self.ring:
            cache = unrolled(cache, longest)
        mask = seen(torch.arange(longest, device=q.device, dtype=torch.int64), positions[:, None], self.window)[
            :, None, None
        ]
        y = attended(q[:, :, None], cache, 0, len(q), longest, mask, self.scale, self.softcap, self.sinks)
        return y[:, :, 0]


@operator("append_attention", returns="Tensor")
class AppendAttentionOp(NamedTuple):
    """One step of attention: `AppendKvOp` of new tokens of each sequence, then `DecodeAttentionOp` of their queries.

    A sequence has one new token, or ``rows`` of them, as drafted tokens are verified: each sees the places up to its
    position, with the new keys and values of the tokens before it.

    With weights of norms, heads of queries and of keys are RMS-normalized first, each by itself: `AddNormOp` without a
    residual, a head a row. Queries are not written back.

    The overload ``early_read`` promises that positions, slots, tables, norms, sinks and cache are ready: no kernel has
    written them since the last kernel that was launched after all before it had ended, as the first of a CUDA graph is.
    On CUDA, kernels for 16-bit queries then read the cache while their predecessor still runs.

    Args:
        q: float16, bfloat16 or float32 ``[B rows, heads, head]``, heads side by side, B to 65,535. Token t belongs to
            sequence ``t // rows``.
        k: ``[B rows, kv_heads, head]`` of q's type, heads side by side.
        v: as k.
        cos: ``[positions, head]`` of q's type, alike for columns i and ``i + head / 2``; None: positions are not
            rotary.
        sin: as ``cos``.
        positions: int32 ``[B rows]``, rows of ``cos`` and ``sin``, and the last place that each query reads, below
            ``context`` and below the slots of its sequence's later tokens; CUDA takes the nearest below ``context``
            for another.
        slots: int32 ``[B rows]``, places in the cache, each below ``context``. CUDA stores nothing of a token with a
            place outside the cache. With several rows, a sequence's slots are consecutive; tokens after the last
            consecutive one are padding: their results are unspecified, and CUDA may store nothing of them.
        keys: as in `qcut.ops.attention.cache.Cache`, S at least B; written.
        values: as ``keys``.
        key_scales: as in `qcut.ops.attention.cache.Cache`, written.
        value_scales: as ``key_scales``.
        scale: multiplies scores.
        counters: int32 of at least ``B * rows * heads`` zeros for the kernel to count with, which leaves zeros; None:
            the operator has its own. Two launches that may run at the same time need counters of their own. In the
            capture of a CUDA graph, counters given spare the graph a memset.
        absmax: float32 ``[B rows]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.
        guide: as in `AppendKvOp`.
        window: as in `DecodeAttentionOp`.
        softcap: as in `DecodeAttentionOp`.
        query_norm: weight ``[head]`` of the norm of queries, of q's type; None: no heads are normalized.
        key_norm: as ``query_norm``, of keys.
        eps: of both norms.
        ring: as in `AppendKvOp` and `DecodeAttentionOp`; ``window + rows - 1`` is at most ``context``.
        reach: as in `DecodeAttentionOp`, the new token's place included.
        sinks: as in `DecodeAttentionOp`.
        rows: new tokens of each sequence, 1 and more. Kernels on CUDA have up to 8; more, and float32, are computed by
            the operators one after the other.
        operands: int32 ``[passes, Kp / 32]``, signs of a rotation of y, K = heads * head columns of a token, as
            `qcut.numerics.codebook.tokens.operands` makes them; None: y is not rotated. q is of 16 bits then.
        group_size: columns of a group of the rotation: 32, 64 or 128, or K or more where K is one of those.
        seeds: of the rotation, one for each pass.

    Returns:
        y ``[B rows, heads, head]`` of q's type, contiguous; rotated, the blocks of its tokens that `RotateTokensOp`
        with ``hadamard`` returns.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above, or ``rows`` does not divide the tokens.
        ConfigError: cosines without sines, one norm without the other, scales that do not go with the cache's type, a
            negative window, softcap or ring, a ring without a window, a reach below 0 or beyond the places, another
            group, no seed, or ``absmax`` of a rotated y.
        RangeError: a place or position out of range, on the CPU.

    Exactness: bitwise the operators one after the other, on the same device: `AppendKvOp` of all tokens, then for each
    j `DecodeAttentionOp` of the j-th tokens of all sequences, then `RotateTokensOp`. With several rows, kernels on CUDA
    differ from that if a window leaves out places of a sequence, as then sums over its keys are added in another
    order; and an infinite or NaN value of a new token may reach its sequence's other new tokens, also those before it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor
    slots: Tensor
    keys: Annotated[Tensor, MUTATED]
    values: Annotated[Tensor, MUTATED]
    key_scales: Annotated[Tensor | None, MUTATED]
    value_scales: Annotated[Tensor | None, MUTATED]
    scale: float
    counters: Annotated[Tensor | None, MUTATED] = None
    absmax: Annotated[Tensor | None, MUTATED] = None
    guide: Tensor | None = None
    window: int = 0
    softcap: float = 0.0
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0
    ring: int = 0
    reach: int = 0
    sinks: Tensor | None = None
    rows: int = 1
    operands: Tensor | None = None
    group_size: int = 0
    seeds: list[int] | None = None
    early_read: bool = False

    @property
    def tokens(self) -> Tokens:
        """Queries, keys and values, and their places."""
        return Tokens(*self[:7])

    @property
    def cache(self) -> Cache:
        """Keys and values to write, then to read."""
        return Cache(*self[7:11])

    @property
    def norms(self) -> tuple[Tensor, ...]:
        """Weights of the norms of queries and of keys where these are normalized."""
        return () if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)

    @property
    def normed(self) -> AppendAttentionOp:
        """The same step of heads that `AddNormOp` has normalized."""
        q, k = (
            torch.ops.qcut.add_norm(x.reshape(-1, x.shape[2]), None, weight, None, False, self.eps)[1].view(x.shape)
            for x, weight in zip((self.q, self.k), self.norms, strict=True)
        )
        return self._replace(q=q, k=k, query_norm=None, key_norm=None)

    @property
    def parts(self) -> tuple[AppendKvOp, list[DecodeAttentionOp]]:
        """The operators that compute the same, on a copy of the queries if these are rotated.

        The first one is of all tokens; the j-th one after it is attention of each sequence's j-th new token.
        """
        tokens, cache = self.tokens, self.cache
        if tokens.rotary or cache.has_rotated_keys:
            tokens = tokens._replace(q=tokens.q.clone())
        options = (self.window, self.softcap, self.ring, self.reach, self.sinks)
        attend = []
        for each in (slice(j, None, self.rows) for j in range(self.rows)):
            read = (tokens.q[each], *cache, tokens.positions[each], self.scale, self.counters)
            attend.append(DecodeAttentionOp(*read, *options))
        return AppendKvOp(*tokens, *cache, self.rows, guide=self.guide, ring=self.ring), attend

    def rotation(self, y: Tensor) -> RotateTokensOp:
        """The rotation of the result y."""
        assert self.operands is not None
        seeds = self.seeds or []
        return RotateTokensOp(y.flatten(1), self.operands, "hadamard", self.group_size, seeds, y.dtype)

    @staticmethod
    def side_by_side(results: list[Tensor]) -> Tensor:
        """Results of the j-th tokens of all sequences, for each j, in the order of the tokens."""
        return results[0] if len(results) == 1 else torch.stack(results, 1).flatten(0, 1)

    def check(self) -> None:
        op = "append_attention"
        _check_tokens(op, self.tokens, self.cache, self.rows)
        _check_launch(op, self.q, self.counters, self.rows)
        check_absmax(op, "absmax", self.absmax, self.q)
        _check_guide(op, self.guide, self.k, self.cache)
        check_scores(op, self.window, self.softcap)
        check_ring(op, self.ring, self.keys.shape[2], self.rows, self.window)
        _check_reach(op, self.reach, self.ring or self.keys.shape[2])
        check_sinks(op, self.sinks, self.q)
        if self.operands is not None:
            if self.absmax is not None:
                raise ConfigError(f"qcut::{op}: absmax is given with a rotation; allowed: one of them")
            check_rotated(op, self.q.flatten(1), self.operands, self.group_size, self.seeds or [], self.q.dtype)
        if (self.query_norm is None) != (self.key_norm is None):
            raise ConfigError(f"qcut::{op}: norms of queries and of keys go together")
        for name, weight in zip(("query_norm", "key_norm"), self.norms, strict=False):
            check_tensor(op, name, weight, (self.q.dtype,), self.q.shape[2:], self.q.device)

    def fake(self) -> Tensor:
        if self.operands is not None:
            return self.rotation(self.q).fake()[0]
        return self.q.new_empty(self.q.shape)

    def cpu(self) -> Tensor:
        append, attend = (self.normed if self.norms else self).parts
        check_indices("qcut::append_attention", "positions", self.positions, self.ring or self.keys.shape[2])
        append.cpu()
        y = self.side_by_side([attention.cpu() for attention in attend])
        int8.raise_absmax(self.absmax, y)
        return y if self.operands is None else self.rotation(y).cpu()[0]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        partner = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        low, high = x.chunk(2, -1)
        partner = torch.cat((-high, low), -1)
    return x * cos + partner * sin


def _check_tokens(op: str, tokens: Tokens, cache: Cache, length: int = 1) -> None:
    q, k, v, cos, sin, positions, slots = tokens
    count, head = check_queries(op, q)
    check_heads(op, "k", k, q.dtype, count, head)
    check_heads(op, "v", v, q.dtype, count, head)
    if length < 1 or count % length:
        raise ShapeError(f"qcut::{op}: {count} tokens, {length} of each sequence; allowed: whole sequences")
    kv_heads = check_cache(op, q, cache, count // length)
    if k.shape[1] != kv_heads or v.shape[1] != kv_heads:
        raise ShapeError(f"qcut::{op}: {k.shape[1]} keys and {v.shape[1]} values a token; the cache has {kv_heads}")
    if (cos is None) != (sin is None):
        raise ConfigError(f"qcut::{op}: cosines and sines go together")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (table.dim() != 2 or table.shape[1] != head or table.dtype is not q.dtype):
            given = f"{list(table.shape)} of {table.dtype}"
            raise ShapeError(f"qcut::{op}: {name} is {given}; allowed: [context, {head}] of {q.dtype}")
    device = q.device
    check_tensor(op, "positions", positions, S32, (count,), device)
    check_tensor(op, "slots", slots, S32, (count,), device)


def _check_guide(op: str, guide: Tensor | None, k: Tensor, cache: Cache) -> None:
    if guide is None:
        return
    if not cache.has_rotated_keys:
        raise ConfigError(f"qcut::{op}: guide goes with 4-bit keys, and only with these")
    check_tensor(op, "guide", guide, S32, (k.shape[1], k.shape[2] + 2, 4), k.device)
    if not guide.is_contiguous():
        raise ShapeError(f"qcut::{op}: guide has strides {list(guide.stride())}; allowed: contiguous")


def _check_reach(op: str, reach: int, places: int) -> None:
    if not 0 <= reach <= places:
        raise ConfigError(f"qcut::{op}: reach is {reach}; allowed: 0 to {places}, the places of a sequence")


def _check_launch(op: str, q: Tensor, counters: Tensor | None, rows: int = 1) -> None:
    """Check what one launch over all queries needs, with so many tokens of each sequence."""
    tokens, heads, _ = q.shape
    sequences = tokens // rows
    if sequences > MAX_SEQUENCES:
        raise ShapeError(f"qcut::{op}: q has {sequences} sequences; allowed: at most {MAX_SEQUENCES}")
    if counters is None:
        return
    check_dtype(op, "counters", counters.dtype, S32)
    places = tokens * heads
    given = counters.dim() == 1 and counters.shape[0] >= places and counters.is_contiguous()
    if not given or counters.device != q.device:
        allowed = f"[{places} or more] on {q.device}, contiguous, one for each query"
        raise ShapeError(f"qcut::{op}: counters are {list(counters.shape)} on {counters.device}; allowed: {allowed}")
