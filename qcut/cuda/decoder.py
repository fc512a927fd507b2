"""CUDA implementations of the operators between a decoder's projections, imported at the first CUDA call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcut.cuda import plans as launch_plans
from qcut.cuda.plans import DTYPES, LaunchPlan, target
from qcut.dispatch.attention import emit_attention, select_attention
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.append import MANY_TOKENS, Rotary, RotateAndAppend, emit_append
from qcut.emitters.decoder.argmax import ArgmaxRows, emit_argmax
from qcut.emitters.decoder.attention.append import AttentionAppend, emit_attention_append
from qcut.emitters.decoder.attention.mma import AttentionMma
from qcut.emitters.decoder.norm import MANY_ROWS, NormRows, emit_norm
from qcut.numerics import int8 as numerics
from qcut.ops import decoder as decoder_ops

_plans: dict[tuple[Any, ...], Any] = {}
_counters: dict[tuple[int, int], list[Tensor]] = {}
_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
_LOG2_E = math.log2(math.e)


def _aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def _pdl(device: int) -> bool:
    return architecture(target(device).arch).pdl


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor]:
    decoder_ops._check_norm(x, residual, weight, bias, layer, eps)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _normed(x, residual, weight, bias, layer, eps, y, None), y


def add_norm_int8(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, layer: bool, eps: float, k_padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    decoder_ops._check_norm_int8(x, residual, weight, bias, layer, eps, k_padded)
    q = torch.empty((len(x), k_padded), dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    return _normed(x, residual, weight, bias, layer, eps, q, scale), q, scale


def _normed(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
    y: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """Write the norm to y, and its scales where it is int8; the sum."""
    (m, k), device = x.shape, x.get_device()
    x, weight = x.contiguous(), weight.contiguous()
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    if m == 0:
        return total
    if residual is not None:
        residual = residual.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    aligned = k * x.element_size() % 16 == 0 and _aligned(x, residual, weight, bias)
    many = m >= MANY_ROWS
    key = ("norm", x.dtype, layer, k, residual is not None, scale is not None, many, aligned, device)
    plan = _plans.get(key)
    if plan is None:
        flags = {"many": many, "residual": residual is not None, "quantized": scale is not None, "aligned": aligned}
        desc = NormRows.for_shape(DTYPES[x.dtype], layer, target(device).arch, k, **flags)
        plan = LaunchPlan(launch_plans.load(emit_norm(desc), device), desc.grid, pdl=_pdl(device))
        _plans[key] = plan
    sums = () if residual is None else (residual.data_ptr(), total.data_ptr())
    biases = ((0 if bias is None else bias.data_ptr()),) if layer else ()
    results = (y.data_ptr(),) if scale is None else (y.data_ptr(), scale.data_ptr())
    sizes = (k, k) if scale is None else (k, k, y.shape[1])
    plan.launch(m, (x.data_ptr(), *sums, weight.data_ptr(), *biases, *results, *sizes, eps), _stream(device))
    return total


def append_kv(
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
    decoder_ops._check_append(q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, length)
    (tokens, heads, head), (_, kv_heads, context, _), device = q.shape, keys.shape, q.get_device()
    if tokens == 0:
        return
    if v.stride(0) != k.stride(0):
        k, v = k.contiguous(), v.contiguous()
    tables = [] if cos is None or sin is None else [cos.contiguous(), sin.contiguous(), positions.contiguous()]
    if not tables:
        heads = 0  # queries have nothing to do
    size, many = q.element_size(), tokens >= MANY_TOKENS
    vector = RotateAndAppend.widest(head, size)
    where = q.data_ptr() | k.data_ptr() | v.data_ptr() | (q.stride(0) | k.stride(0)) * size
    for table in tables[:2]:
        where |= table.data_ptr()
    cache_where = keys.data_ptr() | values.data_ptr()
    aligned = where % (vector * size) == 0 == cache_where % (vector * keys.element_size())
    key = ("append", q.dtype, keys.dtype, head, heads, kv_heads, interleaved, many, aligned, device)
    plan = _plans.get(key)
    if plan is None:
        rotary: Rotary = "none" if not tables else "interleaved" if interleaved else "half"
        types = DTYPES[q.dtype], DTYPES[keys.dtype]
        desc = RotateAndAppend(*types, head, rotary, target(device).arch, many, aligned)
        kernel = launch_plans.load(emit_append(desc), device)
        plan = LaunchPlan(kernel, lambda m: desc.grid(m, heads, kv_heads), pdl=_pdl(device))
        _plans[key] = plan
    scales = [] if key_scales is None or value_scales is None else [key_scales, value_scales]
    given = [q, k, v, *tables, slots.contiguous(), keys, values, *scales]
    sizes = (q.stride(0), k.stride(0), keys.stride(0), heads, kv_heads, context, tokens, length)
    plan.launch(tokens, (*(t.data_ptr() for t in given), *sizes), _stream(device))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    positions: Tensor,
    scale: float,
    counters: Tensor | None = None,
) -> Tensor:
    decoder_ops._check_attention(q, keys, values, key_scales, value_scales, positions, scale, counters)
    if len(q) == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    found = _attention_of("attention", q, keys)
    scales = [] if key_scales is None or value_scales is None else [key_scales, value_scales]
    return found.launch(q, [q, keys, values, *scales, positions.contiguous()], (), keys, scale, counters)


def append_attention(
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
    given = (k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales)
    decoder_ops._check_step(q, *given, scale, counters, absmax)
    if len(q) == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    found = _attention_of("step" if cos is None else "rotary step", q, keys)
    if not found.appends:
        q = q.clone() if cos is not None else q
        append_kv(q, *given)
        mixed = decode_attention(q, keys, values, key_scales, value_scales, positions, scale, counters)
        numerics.raise_absmax(absmax, mixed)
        return mixed
    if v.stride(0) != k.stride(0):
        k, v = k.contiguous(), v.contiguous()
    tables = [] if cos is None or sin is None else [cos.contiguous(), sin.contiguous()]
    scales = [] if key_scales is None or value_scales is None else [key_scales, value_scales]
    tensors = [q, k, v, *tables, positions.contiguous(), slots.contiguous(), keys, values, *scales]
    return found.launch(q, tensors, (k.stride(0),), keys, scale, counters, absmax)


@dataclass(frozen=True)
class _Attention:
    """A plan of attention over a cache, and what it needs beside its operands; `appends` where it also fills it."""

    plan: LaunchPlan
    workspace_floats: int
    places: int
    appends: bool

    def launch(
        self,
        q: Tensor,
        given: list[Tensor],
        strides: tuple[int, ...],
        keys: Tensor,
        scale: float,
        counters: Tensor | None,
        absmax: Tensor | None = None,
    ) -> Tensor:
        """Queue the kernel on what comes before its result, and on strides between those of q and of the cache."""
        out, device = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.get_device()
        workspace = torch.empty(max(1, self.workspace_floats), dtype=torch.float32, device=q.device)
        if counters is None:
            counters = _counters_of(self.places, device, q.device)
        _, kv_heads, context, _ = keys.shape
        sizes = (kv_heads, q.shape[1] // kv_heads, context, scale * _LOG2_E)
        noted = (0 if absmax is None else absmax.data_ptr(),) * self.appends
        pointers = (t.data_ptr() for t in (*given, out, workspace, counters))
        self.plan.launch(len(q), (*pointers, *noted, q.stride(0), *strides, keys.stride(0), *sizes), _stream(device))
        return out


def _attention_of(kind: str, q: Tensor, keys: Tensor) -> _Attention:
    """The plan of ``attention``, or of a ``step`` or ``rotary step``, which has none where the two are apart."""
    (batch, heads, head), (_, kv_heads, context, _), device = q.shape, keys.shape, q.get_device()
    key = (kind, q.dtype, keys.dtype, head, heads, kv_heads, context, batch, device)
    found: _Attention | None = _plans.get(key)
    if found is None:
        queries, gpu = heads // kv_heads, target(device)
        cache = DType.S8 if keys.dtype is torch.int8 else DTYPES[keys.dtype]
        sizes = {"batch": batch, "kv_heads": kv_heads, "context": context}
        desc, parts = select_attention(DTYPES[q.dtype], cache, head, queries, gpu, **sizes)
        if kind == "attention":
            source = emit_attention(desc)
        elif isinstance(desc, AttentionMma):
            source = emit_attention_append(AttentionAppend(desc, kind == "rotary step"))
        else:
            return _plans.setdefault(key, _attention_of("attention", q, keys))
        grid = desc.grid(batch, kv_heads, queries, parts)
        plan = LaunchPlan(launch_plans.load(source, device), lambda m: grid, pdl=_pdl(device))
        floats = desc.workspace_floats(batch, kv_heads, queries, parts)
        found = _plans[key] = _Attention(plan, floats, grid[1] * batch, kind != "attention")
    return found


def argmax(logits: Tensor) -> Tensor:
    decoder_ops._check_argmax(logits)
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _chosen(logits, best)
    return best


def advance(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, context: int) -> None:
    decoder_ops._check_advance(logits, tokens, positions, slots, context)
    _chosen(logits, tokens, positions, slots, context=context)


def _chosen(logits: Tensor, best: Tensor, *state: Tensor, context: int | None = None) -> None:
    if len(logits) == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.get_device()
    key = ("argmax", logits.dtype, context is None, device)
    plan = _plans.get(key)
    if plan is None:
        desc = ArgmaxRows(DTYPES[logits.dtype], target(device).arch, context is not None)
        plan = LaunchPlan(launch_plans.load(emit_argmax(desc), device), desc.grid, pdl=_pdl(device))
        _plans[key] = plan
    pointers = (t.data_ptr() for t in (logits, best, *state))
    last = () if context is None else (context,)
    plan.launch(len(logits), (*pointers, logits.stride(0), logits.shape[1], *last), _stream(device))


def _counters_of(places: int, index: int, device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros; one set for each stream, whose launches follow one another."""
    sets = _counters.setdefault((index, _stream(index)), [])
    if not sets or len(sets[-1]) < places:
        # Smaller ones stay: a graph may have been captured with them.
        sets.append(torch.zeros(max(places, 4096), dtype=torch.int32, device=device))
    return sets[-1]
