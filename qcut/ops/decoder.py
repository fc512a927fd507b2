"""The operators of ``torch.ops.qcut`` between a decoder's projections: norms, rotary positions and cache, attention.

They serve one new token of each sequence, `append_kv` prompts as well. CUDA runs `qcut.cuda.decoder`; the CPU plain
torch, with the roundings of an eager model of transformers. `qcut.ops` says what holds for all operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8 as numerics
from qcut.numerics import sampling
from qcut.ops.checks import FLOAT_DTYPES, check_absmax, check_dtype, check_tensor
from qcut.ops.registry import define

_I32, _F32 = (torch.int32,), (torch.float32,)

# ── add_norm ─────────────────────────────────────────────────────────────────────────────────────


def _check_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    op: str = "add_norm",
) -> None:
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
    if residual is not None:
        check_tensor(op, "residual", residual, (x.dtype,), tuple(x.shape), x.device)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_tensor(op, name, vector, (x.dtype,), (x.shape[1],), x.device)
    if bias is not None and not layer:
        raise ConfigError(f"qcut::{op}: an RMS norm has no bias")


def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if residual is not None else (0,)), x.new_empty(x.shape)


def _norm_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()  # results are, on every device
    total = x.new_empty(0) if residual is None else x + residual.contiguous()
    s = x if residual is None else total
    if layer:
        return total, F.layer_norm(s, (s.shape[1],), weight, bias, eps)
    f = s.float()
    return total, weight * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)).to(s.dtype)


define(
    "add_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, bool layer, float eps) -> (Tensor, Tensor)",
    _check_norm,
    _norm_fake,
    _norm_cpu,
    cuda="cuda.decoder",
)


def _norm_int8_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float, k_padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    total, _ = _norm_fake(x, residual, weight, bias, layer, eps)
    return total, x.new_empty((len(x), k_padded), dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)


def _norm_int8_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float, k_padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    total, y = _norm_cpu(x, residual, weight, bias, layer, eps)
    return total, *numerics.quantize_per_token_ref(y, k_padded)


def _check_norm_int8(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float, k_padded: int
) -> None:
    _check_norm(x, residual, weight, bias, layer, eps, "add_norm_int8")
    if k_padded < x.shape[1] or k_padded % 16:
        allowed = f"a multiple of 16 from {x.shape[1]} on"
        raise ShapeError(f"qcut::add_norm_int8: k_padded is {k_padded}; allowed: {allowed}")


define(
    "add_norm_int8(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, bool layer, float eps, int k_padded) "
    "-> (Tensor, Tensor, Tensor)",
    _check_norm_int8,
    _norm_int8_fake,
    _norm_int8_cpu,
    cuda="cuda.decoder",
)

# ── append_kv ────────────────────────────────────────────────────────────────────────────────────


def _check_heads(op: str, name: str, rows: Tensor, of: Tensor) -> None:
    check_dtype(op, name, rows.dtype, (of.dtype,))
    if rows.dim() != 3 or rows.shape[0] != of.shape[0] or rows.shape[2] != of.shape[2]:
        allowed = f"[{of.shape[0]}, heads, {of.shape[2]}]"
        raise ShapeError(f"qcut::{op}: {name} has shape {list(rows.shape)}; allowed: {allowed}")
    if rows.shape[0] and rows.stride()[1:] != (rows.shape[2], 1):
        raise ShapeError(
            f"qcut::{op}: {name} has strides {list(rows.stride())}; allowed: heads of a token side by side"
        )


def _check_cache(
    op: str,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: int = 1,
) -> None:
    int8, sequences = keys.dtype is torch.int8, len(q) // length
    check_dtype(op, "keys", keys.dtype, (q.dtype, torch.int8))
    if keys.dim() != 4 or keys.shape[0] < sequences or keys.shape[3] != q.shape[2] or not keys.is_contiguous():
        allowed = f"[{sequences} or more, kv_heads, context, {q.shape[2]}], contiguous"
        raise ShapeError(f"qcut::{op}: keys have shape {list(keys.shape)}; allowed: {allowed}")
    check_tensor(op, "values", values, (keys.dtype,), tuple(keys.shape), keys.device)
    if q.shape[1] % keys.shape[1]:
        raise ShapeError(f"qcut::{op}: {q.shape[1]} queries of {keys.shape[1]} heads of keys; allowed: whole multiples")
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if (scales is not None) != int8:
            raise ConfigError(f"qcut::{op}: {name} goes with an int8 cache, and only with one")
        if scales is not None:
            check_tensor(op, name, scales, _F32, tuple(keys.shape[:3]), keys.device)


def _check_tokens(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: int = 1,
) -> None:
    check_dtype(op, "q", q.dtype, FLOAT_DTYPES)
    for name, rows in (("q", q), ("k", k), ("v", v)):
        _check_heads(op, name, rows, q)
    if length < 1 or len(q) % length:
        raise ShapeError(f"qcut::{op}: {len(q)} tokens, {length} of each sequence; allowed: whole sequences")
    _check_cache(op, q, keys, values, key_scales, value_scales, length)
    if k.shape[1] != keys.shape[1] or v.shape[1] != keys.shape[1]:
        raise ShapeError(
            f"qcut::{op}: {k.shape[1]} keys and {v.shape[1]} values a token; the cache has {keys.shape[1]}"
        )
    if (cos is None) != (sin is None):
        raise ConfigError(f"qcut::{op}: cosines and sines go together")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (table.dim() != 2 or table.shape[1] != q.shape[2] or table.dtype is not q.dtype):
            found = f"{list(table.shape)} of {table.dtype}"
            raise ShapeError(f"qcut::{op}: {name} is {found}; allowed: [context, {q.shape[2]}] of {q.dtype}")
    for name, places in (("positions", positions), ("slots", slots)):
        check_tensor(op, name, places, _I32, (len(q),), q.device)


def _check_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: int = 1,
    interleaved: bool = False,
) -> None:
    _check_tokens("append_kv", q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, length)


def _append_fake(*args: Tensor | int | None) -> None:
    return None


def _append_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    length: int = 1,
    interleaved: bool = False,
) -> None:
    if cos is not None and sin is not None:
        at = positions.long()
        q.copy_(_rotated(q, cos[at, None], sin[at, None], interleaved))
        k = _rotated(k, cos[at, None], sin[at, None], interleaved)
    rows, places = torch.arange(len(q), device=q.device) // length, slots.long()
    for cache, scales, new in ((keys, key_scales, k), (values, value_scales, v)):
        if scales is not None:
            stored, scale = numerics.quantize_per_token_ref(new.reshape(-1, new.shape[2]), new.shape[2])
            scales[rows, :, places] = scale.view(new.shape[:2])
            new = stored.view(new.shape)
        cache[rows, :, places] = new


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        low, high = x.chunk(2, -1)
        other = torch.cat((-high, low), -1)
    return x * cos + other * sin


define(
    "append_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor positions, Tensor slots, "
    "Tensor(b!) keys, Tensor(c!) values, Tensor(d!)? key_scales, Tensor(e!)? value_scales, int length=1, "
    "bool interleaved=False) -> ()",
    _check_append,
    _append_fake,
    _append_cpu,
    cuda="cuda.decoder",
)

# ── decode_attention ─────────────────────────────────────────────────────────────────────────────


def _check_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    positions: Tensor,
    scale: float,
    counters: Tensor | None = None,
) -> None:
    op = "decode_attention"
    check_dtype(op, "q", q.dtype, FLOAT_DTYPES)
    _check_heads(op, "q", q, q)
    _check_cache(op, q, keys, values, key_scales, value_scales)
    check_tensor(op, "positions", positions, _I32, (len(q),), q.device)
    _check_counters(op, q, counters)


def _check_counters(op: str, q: Tensor, counters: Tensor | None) -> None:
    if counters is None:
        return
    check_dtype(op, "counters", counters.dtype, _I32)
    if counters.dim() != 1 or len(counters) < q.shape[0] * q.shape[1] or counters.device != q.device:
        allowed = f"[{q.shape[0] * q.shape[1]} or more] on {q.device}, one for each query"
        raise ShapeError(f"qcut::{op}: counters are {list(counters.shape)} on {counters.device}; allowed: {allowed}")


def _attention_fake(q: Tensor, *_: Tensor | float | None) -> Tensor:
    return q.new_empty(q.shape)


def _attention_cpu(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    positions: Tensor,
    scale: float,
    counters: Tensor | None = None,
) -> Tensor:
    longest = int(positions.max()) + 1 if len(q) else 0
    k, v = (_widened(t, s, len(q), longest, q.dtype) for t, s in ((keys, key_scales), (values, value_scales)))
    mask = (torch.arange(longest, device=q.device) <= positions[:, None])[:, None, None]
    mixed = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return mixed[:, :, 0]


def _widened(cache: Tensor, scales: Tensor | None, batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    kept = cache[:batch, :, :tokens]
    return kept if scales is None else (kept.float() * scales[:batch, :, :tokens, None]).to(dtype)


define(
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor? key_scales, Tensor? value_scales, "
    "Tensor positions, float scale, Tensor(a!)? counters=None) -> Tensor",
    _check_attention,
    _attention_fake,
    _attention_cpu,
    cuda="cuda.decoder",
)

# ── append_attention ─────────────────────────────────────────────────────────────────────────────


def _check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    counters: Tensor | None = None,
    absmax: Tensor | None = None,
) -> None:
    op = "append_attention"
    _check_tokens(op, q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales)
    _check_counters(op, q, counters)
    check_absmax(op, "absmax", absmax, q)


def _step_fake(q: Tensor, *_: Tensor | float | None) -> Tensor:
    return q.new_empty(q.shape)


def _step_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    counters: Tensor | None = None,
    absmax: Tensor | None = None,
) -> Tensor:
    q = q.clone()
    _append_cpu(q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales)
    mixed = _attention_cpu(q, keys, values, key_scales, value_scales, positions, scale)
    numerics.raise_absmax(absmax, mixed)
    return mixed


define(
    "append_attention(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor positions, Tensor slots, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, Tensor(d!)? value_scales, float scale, "
    "Tensor(e!)? counters=None, Tensor(f!)? absmax=None) -> Tensor",
    _check_step,
    _step_fake,
    _step_cpu,
    cuda="cuda.decoder",
)

# ── activations ──────────────────────────────────────────────────────────────────────────────────


# ── argmax ───────────────────────────────────────────────────────────────────────────────────────


def _check_argmax(logits: Tensor) -> None:
    op = "argmax"
    check_dtype(op, "logits", logits.dtype, FLOAT_DTYPES)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= sampling.MAX_VOCABULARY:
        allowed = f"[B, V], V of 1 to {sampling.MAX_VOCABULARY}"
        raise ShapeError(f"qcut::{op}: logits have shape {list(logits.shape)}; allowed: {allowed}")


def _argmax_fake(logits: Tensor) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.int64)


define("argmax(Tensor logits) -> Tensor", _check_argmax, _argmax_fake, sampling.argmax, cuda="cuda.decoder")


def _check_advance(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, context: int) -> None:
    op = "advance"
    _check_argmax(logits)
    for name, state, dtype in (("tokens", tokens, torch.int64), ("positions", positions, None), ("slots", slots, None)):
        check_tensor(op, name, state, (dtype or torch.int32,), (len(logits),), logits.device)
        if not state.is_contiguous():
            raise ShapeError(f"qcut::{op}: {name} have strides {list(state.stride())}; allowed: contiguous")
    if context < 1:
        raise ConfigError(f"qcut::{op}: context is {context}; allowed: 1 and more")


def _advance_fake(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, context: int) -> None:
    return None


def _advance_cpu(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, context: int) -> None:
    tokens.copy_(sampling.argmax(logits))
    positions.add_(1).clamp_(max=context - 1)
    slots.add_(1).clamp_(max=context)


define(
    "advance(Tensor logits, Tensor(a!) tokens, Tensor(b!) positions, Tensor(c!) slots, int context) -> ()",
    _check_advance,
    _advance_fake,
    _advance_cpu,
    cuda="cuda.decoder",
)
