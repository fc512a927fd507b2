"""A cache of keys and values, its checks, and those of the queries that read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.ops.checks import F32, FLOAT_DTYPES, check_dtype, check_tensor


class Cache(NamedTuple):
    """Keys and values of earlier tokens.

    Attributes:
        keys: ``[S, kv_heads, context, head]`` of the queries' type or int8, contiguous.
        values: as ``keys``.
        key_scales: float32 ``[S, kv_heads, context]`` of an int8 cache, contiguous; else None.
        value_scales: as ``key_scales``.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Scales of keys and of values where the cache is int8."""
        if self.key_scales is None or self.value_scales is None:
            return ()
        return self.key_scales, self.value_scales


def dequantized(stored: Tensor, scales: Tensor | None, batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """The first tokens of the first sequences' keys or values, of an int8 cache rounded to a dtype."""
    rows = stored[:batch, :, :tokens]
    return rows if scales is None else (rows.float() * scales[:batch, :, :tokens, None]).to(dtype)


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
    check_dtype(op, "keys", dtype, (q.dtype, torch.int8))
    if len(shape) != 4 or shape[0] < sequences or shape[3] != head or not keys.is_contiguous():
        allowed = f"[{sequences} or more, kv_heads, context, {head}], contiguous"
        raise ShapeError(f"qcut::{op}: keys have shape {list(shape)}; allowed: {allowed}")
    check_tensor(op, "values", values, (dtype,), shape, device)
    _check_contiguous(op, "values", values)
    if heads % shape[1]:
        raise ShapeError(f"qcut::{op}: {heads} queries of {shape[1]} heads of keys; allowed: whole multiples")
    if dtype is not torch.int8 and key_scales is value_scales is None:
        return shape[1]
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if (scales is not None) != (dtype is torch.int8):
            raise ConfigError(f"qcut::{op}: {name} goes with an int8 cache, and only with one")
        if scales is not None:
            check_tensor(op, name, scales, F32, shape[:3], device)
            _check_contiguous(op, name, scales)
    return shape[1]


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ShapeError(f"qcut::{op}: {name} have strides {list(tensor.stride())}; allowed: contiguous")
