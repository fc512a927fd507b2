"""A cache of keys and values, its checks, and those of the queries that read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int4
from qcut.ops.checks import F32, FLOAT_DTYPES, check_dtype, check_tensor

SCALE_DTYPES = {torch.int8: torch.float32, torch.uint8: torch.int16}
"""Of scales, by the dtype of the rows that have them."""


class Cache(NamedTuple):
    """Keys and values of earlier tokens.

    Attributes:
        keys: ``[S, kv_heads, context, head]`` of the queries' type or int8, contiguous; or uint8 ``[.., head / 2]`` of
            two 4-bit codes, the even column's in the lower half, for heads of `qcut.numerics.int4.HEADS`.
        values: as ``keys``; of int8 and 4-bit rows, keys may be the ones and values the others.
        key_scales: contiguous ``[S, kv_heads, context]``: float32 of int8 keys, int16 words of 4-bit keys; else None.
        value_scales: as ``key_scales``, of the values.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @staticmethod
    def columns(head: int, dtype: torch.dtype) -> int:
        """Elements of a row of a head in a dtype."""
        return head // 2 if dtype is torch.uint8 else head

    @property
    def has_rotated_keys(self) -> bool:
        """Whether keys are of 4 bits, so that queries are Hadamard-rotated with them."""
        return self.keys.dtype is torch.uint8

    @property
    def has_rotated_values(self) -> bool:
        """Whether values are of 4 bits, so that weighted values are to be rotated back."""
        return self.values.dtype is torch.uint8

    def reading(self, dtype: torch.dtype, sinks: Tensor | None) -> torch.dtype:
        """The dtype in which torch computes attention for queries of a dtype."""
        # Hadamard-rotated values are not rounded before they are rotated back.
        in_float32 = self.has_rotated_keys or self.has_rotated_values or sinks is not None
        return torch.float32 if in_float32 else dtype

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Scales of keys and of values if they are int8 or of 4 bits."""
        if self.key_scales is None or self.value_scales is None:
            return ()
        return self.key_scales, self.value_scales


def dequantized(stored: Tensor, scales: Tensor | None, batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """The first tokens of the first sequences' keys or values, rounded to a dtype; 4-bit rows stay Hadamard-rotated."""
    rows = stored[:batch, :, :tokens]
    if scales is None:
        return rows.to(dtype)
    mine = scales[:batch, :, :tokens]
    floats = int4.dequantize_rows_ref(rows, mine) if rows.dtype is torch.uint8 else rows.float() * mine[..., None]
    return floats.to(dtype)


def check_ring(op: str, ring: int, context: int, read: int, window: int | None = None) -> None:
    """Check whether a cache of ``context`` rows for each sequence can be a ring.

    Args:
        op: name of the operator.
        ring: see `qcut.ops.attention.decode.AppendKvOp`.
        context: rows of a sequence.
        read: tokens of a sequence that are written before the first of them is read.
        window: see `check_scores`; None: nothing is read.
    """
    if ring < 0:
        raise ConfigError(f"qcut::{op}: ring is {ring}; allowed: 1 and more places, or 0 for a cache that is no ring")
    if not ring:
        return
    if window == 0:
        raise ConfigError(f"qcut::{op}: a ring of {context} rows goes with a window; allowed: 1 and more")
    if (window or 1) + read - 1 > context:
        needed = f"{read} tokens" if window is None else f"{read} tokens and a window of {window}"
        raise ShapeError(f"qcut::{op}: a ring of {context} rows, {needed}; allowed: {(window or 1) + read - 1} or more")


def unrolled(cache: Cache, places: int) -> Cache:
    """The first places of a cache that is a ring, each where it would be without; those overwritten hold others."""
    rows = torch.arange(places, device=cache.keys.device, dtype=torch.int64) % cache.keys.shape[2]
    return Cache(*(None if part is None else part[:, :, rows] for part in cache))  # type: ignore[arg-type]


def attended(
    q: Tensor,
    cache: Cache,
    first: int,
    batch: int,
    tokens: int,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries ``[batch, heads, rows, head]`` to the first tokens of sequences, in plain torch.

    Args:
        q: queries, Hadamard-rotated where keys are of 4 bits.
        cache: keys and values.
        first: the first sequence.
        batch: number of sequences.
        tokens: places of each that are read.
        mask: the places that each row sees, of a shape that broadcasts to ``[batch, heads, rows, tokens]``.
        scale: multiplies scores.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0: they stay.
        sinks: see `qcut.ops.attention.decode.DecodeAttentionOp`; with sinks, only the result is rounded to q's dtype.

    Returns:
        ``[batch, heads, rows, head]`` of q's dtype.
    """
    dtype = cache.reading(q.dtype, sinks)
    k, v = (
        dequantized(rows[first:], None if scales is None else scales[first:], batch, tokens, dtype)
        for rows, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    )
    y = mixed_values(q.to(dtype), k, v, mask, scale, softcap, sinks)
    return (int4.rotate_back(y) if cache.has_rotated_values else y).to(q.dtype)


def mixed_values(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """Values mixed by the softmax of scores, in torch: its own attention, or its parts with a softcap or sinks.

    Args:
        q: ``[batch, heads, rows, head]``.
        k: ``[batch, kv_heads, tokens, head]``, kv_heads a divisor of heads.
        v: as ``k``.
        mask: see `attended`.
        scale: multiplies scores.
        softcap: see `attended`.
        sinks: see `attended`.
    """
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], 1) for rows in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), 3)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(q.dtype) @ v


def seen(places: Tensor, own: Tensor, window: int) -> Tensor:
    """Whether queries at places ``own`` see ``places``, which broadcast: those up to their own, through a window."""
    mask = places <= own
    return mask & (places > own - window) if window else mask


def check_scores(op: str, window: int, softcap: float) -> None:
    """Check a window and a softcap."""
    if window < 0:
        raise ConfigError(f"qcut::{op}: window is {window}; allowed: 1 and more, or 0 for all places")
    if not 0 <= softcap < float("inf"):
        raise ConfigError(f"qcut::{op}: softcap is {softcap}; allowed: above 0, or 0 for scores as they are")


def check_sinks(op: str, sinks: Tensor | None, q: Tensor) -> None:
    """Check logits of sinks, one for each head of queries."""
    if sinks is not None:
        check_tensor(op, "sinks", sinks, F32, (q.shape[1],), q.device)
        _check_contiguous(op, "sinks", sinks)


def check_queries(op: str, q: Tensor) -> tuple[int, int]:
    """Check queries; their number, and the columns of a head."""
    check_dtype(op, "q", q.dtype, FLOAT_DTYPES)
    if q.dim() != 3:
        raise ShapeError(f"qcut::{op}: q has shape {list(q.shape)}; allowed: [tokens, heads, head]")
    count, _, head = q.shape
    check_heads(op, "q", q, q.dtype, count, head)
    return count, head


def check_heads(op: str, name: str, rows: Tensor, dtype: torch.dtype, count: int, head: int) -> None:
    """Check heads of tokens, which lie side by side."""
    if rows.dtype is not dtype:
        check_dtype(op, name, rows.dtype, (dtype,))
    shape = rows.shape
    if len(shape) != 3 or shape[0] != count or shape[2] != head:
        raise ShapeError(f"qcut::{op}: {name} has shape {list(shape)}; allowed: [{count}, heads, {head}]")
    if count and rows.stride()[1:] != (head, 1):
        raise ShapeError(
            f"qcut::{op}: {name} has strides {list(rows.stride())}; allowed: heads of a token side by side"
        )


def check_cache(op: str, q: Tensor, cache: Cache, sequences: int) -> int:
    """Check a cache that queries of some sequences read; its heads."""
    keys, values, key_scales, value_scales = cache
    dtype, shape, device = keys.dtype, keys.shape, keys.device
    _, heads, head = q.shape
    check_dtype(op, "keys", dtype, (q.dtype, *SCALE_DTYPES))
    if cache.has_rotated_keys or cache.has_rotated_values:
        int4.check_head(head)
    columns = cache.columns(head, dtype)
    if len(shape) != 4 or shape[0] < sequences or shape[3] != columns or not keys.is_contiguous():
        allowed = f"[{sequences} or more, kv_heads, context, {columns}], contiguous"
        raise ShapeError(f"qcut::{op}: keys have shape {list(shape)}; allowed: {allowed}")
    kinds = tuple(SCALE_DTYPES) if dtype in SCALE_DTYPES else (dtype,)
    check_tensor(op, "values", values, kinds, (*shape[:3], cache.columns(head, values.dtype)), device)
    _check_contiguous(op, "values", values)
    if heads % shape[1]:
        raise ShapeError(f"qcut::{op}: {heads} queries of {shape[1]} heads of keys; allowed: whole multiples")
    if dtype not in SCALE_DTYPES and key_scales is value_scales is None:
        return shape[1]
    for name, scales, kind in (
        ("key_scales", key_scales, SCALE_DTYPES.get(dtype)),
        ("value_scales", value_scales, SCALE_DTYPES.get(values.dtype)),
    ):
        if (scales is not None) != (kind is not None):
            raise ConfigError(f"qcut::{op}: {name} goes with an int8 cache or a 4-bit one, and only with these")
        if scales is not None and kind is not None:
            check_tensor(op, name, scales, (kind,), shape[:3], device)
            _check_contiguous(op, name, scales)
    return shape[1]


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ShapeError(f"qcut::{op}: {name} have strides {list(tensor.stride())}; allowed: contiguous")
