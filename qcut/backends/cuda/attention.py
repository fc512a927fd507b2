"""`qcut.ops.attention.decode` on CUDA."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from qcut.backends.cuda.codebook import rotate
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, describing, has_pdl, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.dispatch import ahead_of_time
from qcut.dispatch.attention import check_heads, select_attention
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.append_tokens import AttentionAppendTokens
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.scores import Scores
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.append import MANY_TOKENS, Rotary, RotateAndAppend
from qcut.errors import DtypeError
from qcut.numerics import int8
from qcut.numerics.codebook.layout import Geometry
from qcut.ops.attention.decode import AppendAttentionOp, AppendKvOp, DecodeAttentionOp
from qcut.ops.attention.prefill import PromptAttentionOp
from qcut.ops.registry import serves

_LOG2_E = math.log2(math.e)

# ── filling the cache ────────────────────────────────────────────────────────────────────────────


@serves(AppendKvOp)
def append_kv(call: AppendKvOp) -> None:
    call.check()
    _append(call)


def _append(call: AppendKvOp) -> None:
    tokens, cache = call.tokens, call.cache
    q, k, v = tokens.q, tokens.k, tokens.v
    (count, heads, head), (_, kv_heads, context, _), device = q.shape, cache.keys.shape, q.get_device()
    rotated = cache.has_rotated_keys or cache.has_rotated_values
    if count == 0:
        return
    if v.stride(0) != k.stride(0):
        k, v = k.contiguous(), v.contiguous()
    tables = [table.contiguous() for table in tokens.rotary]
    rotary: Rotary = "none" if not tables else "interleaved" if call.interleaved else "half"
    queries = heads if tables or cache.has_rotated_keys else 0  # else the kernel does not write queries
    size, many = q.element_size(), count >= MANY_TOKENS
    vector = RotateAndAppend.widest(head, size)
    rows = q.data_ptr() | k.data_ptr() | v.data_ptr() | (q.stride(0) | k.stride(0)) * size
    for table in tables:
        rows |= table.data_ptr()
    stored = cache.keys.data_ptr() | cache.values.data_ptr()
    aligned = rows % (vector * size) == 0 == stored % (vector * cache.keys.element_size())
    if rotated and rows % (vector * size):
        _append_aligned(call, tables)
        return
    key = (
        q.dtype,
        cache.keys.dtype,
        cache.values.dtype,
        head,
        queries,
        kv_heads,
        rotary,
        many,
        aligned or rotated,
        call.ring > 0,
        device,
    )
    plan = _append_plans[key]
    if tables:
        tables.append(tokens.positions.contiguous())
    given = [q, k, v, *tables, tokens.slots.contiguous(), cache.keys, cache.values, *cache.scales]
    strides = (q.stride(0), k.stride(0), kv_heads * context * head)
    sizes = (queries, kv_heads, context, count, call.length, *ring_arguments(call))
    pointers = (*(t.data_ptr() for t in given), *_guide(call))
    plan.launch(count, (*pointers, *strides, *sizes), current_stream(device))


def _guide(call: AppendKvOp | AppendAttentionOp) -> tuple[int, ...]:
    """The address that kernels which write 4-bit keys take; null without a guide."""
    if not call.cache.has_rotated_keys:
        return ()
    return (0 if call.guide is None else call.guide.data_ptr(),)


def _append_aligned(call: AppendKvOp, tables: list[Tensor]) -> None:
    """As `append_kv`, for rows that do not start at whole vectors; no kernel makes 4-bit rows of these."""
    q, k, v = (rows.clone(memory_format=torch.contiguous_format) for rows in call.tokens[:3])
    cos, sin = (table.clone() for table in tables) if tables else (None, None)
    _append(call._replace(q=q, k=k, v=v, cos=cos, sin=sin))
    call.q.copy_(q)


@PlanCache
def _append_plans(
    dtype: torch.dtype,
    keys: torch.dtype,
    values: torch.dtype,
    head: int,
    queries: int,
    kv_heads: int,
    rotary: Rotary,
    many: bool,
    aligned: bool,
    ring: bool,
    device: int,
) -> LaunchPlan:
    types, value_dtype = (DTYPES[dtype], DTYPES[keys]), values_beside(keys, values)
    desc = RotateAndAppend(*types, head, rotary, target(device).arch, many, aligned, value_dtype, ring)
    source = desc.emit()
    return LaunchSpec(source, lambda m: desc.grid(m, queries, kv_heads), pdl=pdl(device)).load(device)


# ── reading the cache ────────────────────────────────────────────────────────────────────────────


def values_beside(keys: torch.dtype, values: torch.dtype) -> DType | None:
    """The emitters' type of values that are of another type than keys."""
    return None if values is keys else DTYPES[values]


def check_cache(dtype: torch.dtype, keys: torch.dtype, values: torch.dtype, head: int, device: int) -> None:
    """Check that a GPU has kernels for a cache, before anything is built.

    Args:
        dtype: of queries.
        keys: dtype of the cache's keys.
        values: dtype of its values.
        head: columns of a head.
        device: CUDA ordinal.

    Raises:
        UnsupportedError: it has none; the message names what kernels take.
    """
    with describing():
        check_heads(DTYPES[dtype], DTYPES[keys], head, target(device), values_beside(keys, values))


def seen_through(call: DecodeAttentionOp | AppendAttentionOp | PromptAttentionOp) -> int:
    """The window of a ring, or one that leaves a part of the cache, else 0: others serve wider ones."""
    return call.window if call.ring or call.window < call.keys.shape[2] else 0


def ring_arguments(call: AppendKvOp | DecodeAttentionOp | AppendAttentionOp | PromptAttentionOp) -> tuple[int, ...]:
    """The bound of places that kernels of rings take."""
    return (call.ring,) if call.ring else ()


def scores_arguments(call: DecodeAttentionOp | AppendAttentionOp | PromptAttentionOp) -> tuple[int | float, ...]:
    """``scale`` of kernels of attention, and what `Scores` adds: see `qcut.emitters.attention.scores`."""
    window, rest = (call.window,) if seen_through(call) else (), ring_arguments(call)
    if call.sinks is not None:
        rest = (*rest, call.sinks.data_ptr())
    if call.softcap:
        return (2 * _LOG2_E * call.scale / call.softcap, *window, call.softcap * _LOG2_E, *rest)
    return (call.scale * _LOG2_E, *window, *rest)


class Counters:
    """Counters, zero before and after each launch, with which attention kernels count their finished CTAs.

    Launches on one stream follow one another and share a tensor. A CUDA graph gets a tensor of its own. Its memory
    belongs to the graph, and each replay sets it to zero first: a graph can be replayed on any stream, before any other
    graph or at the same time.
    """

    def __init__(
        self,
        stream: Callable[[int], int] = current_stream,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._stream, self._is_capturing = stream, is_capturing
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()

    def take(self, count: int, like: Tensor) -> Tensor:
        """Int32 zeros ``[count]`` or more on the device of ``like``, for one launch on the current stream."""
        if self._is_capturing():
            return like.new_zeros(count, dtype=torch.int32)
        device = like.get_device()
        key = (device, self._stream(device))
        kept = self._kept.get(key)
        if kept is not None and len(kept) >= count:
            return kept
        with self._lock:  # threads of one stream share the tensor
            kept = self._kept.get(key)
            if kept is None or len(kept) < count:
                kept = self._kept[key] = like.new_zeros(max(count, 4096), dtype=torch.int32)
        return kept


_counters = Counters()

Form = Literal["read", "append", "rotate_and_append"]


@dataclass(frozen=True)
class AttentionPlan:
    """A kernel of attention for one shape.

    Attributes:
        kernel: the launch.
        workspace_floats: number of float32 values in which CTAs leave their parts of the result; 0 for a kernel that
            needs no workspace.
        counters: number of zeros that the kernel counts with; 0 without a workspace.
        appends: whether the kernel fills the cache too.
        norms: whether the kernel normalizes heads too, if a call needs that.
        rotates: whether the kernel rotates the result too, if a call needs that.
    """

    kernel: LaunchPlan
    workspace_floats: int
    counters: int
    appends: bool
    norms: bool
    rotates: bool


@serves(DecodeAttentionOp)
def decode_attention(call: DecodeAttentionOp) -> Tensor:
    call.check()
    if call.q.shape[0] == 0:
        return torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    return _decode(call)


def _decode(call: DecodeAttentionOp) -> Tensor:
    cache = call.cache
    given = [call.q, *cache[:2], *cache.scales, call.positions.contiguous()]
    return _launch(_plan_for("read", call), call, given)


@serves(AppendAttentionOp)
def append_attention(call: AppendAttentionOp) -> Tensor:
    call.check()
    if call.q.shape[0] == 0:
        return call.fake()
    plan = _plan_for("append" if call.cos is None else "rotate_and_append", call)
    if call.norms and not plan.norms:
        return append_attention(call.normed)
    if call.operands is not None and not plan.rotates:
        y = append_attention(call._replace(operands=None))
        return rotate(call.rotation(y))[0]
    if not plan.appends:
        append, attend = call.parts
        _append(append)
        y = call.side_by_side([_decode(attention) for attention in attend])
        int8.raise_absmax(call.absmax, y)
        return y
    tokens, cache = call.tokens, call.cache
    k, v = tokens.k, tokens.v
    if v.stride(0) != k.stride(0):
        k, v = k.contiguous(), v.contiguous()
    tables = [table.contiguous() for table in tokens.rotary]
    places = [tokens.positions.contiguous(), tokens.slots.contiguous()]
    given = [tokens.q, k, v, *tables, *places, *cache[:2], *cache.scales]
    absmax = 0 if call.absmax is None else call.absmax.data_ptr()
    weights = [weight.contiguous() for weight in call.norms]
    last = (*(weight.data_ptr() for weight in weights), call.eps) if weights else ()
    if call.operands is not None:
        signs = call.operands.contiguous()
        last += (signs.data_ptr(), 32 * signs.shape[1])
    return _launch(plan, call, given, _guide(call), (absmax,), (k.stride(0),), last)


def _launch(
    plan: AttentionPlan,
    call: DecodeAttentionOp | AppendAttentionOp,
    given: list[Tensor],
    guide: tuple[int, ...] = (),
    absmax: tuple[int, ...] = (),
    kv_stride: tuple[int, ...] = (),
    last: tuple[int | float, ...] = (),
) -> Tensor:
    """Queue the kernel; one that appends takes a guide, absmax, the stride of keys and values, norms and signs too."""
    q, (_, kv_heads, context, _) = call.q, call.keys.shape
    head = q.shape[2]
    y = call.fake() if plan.rotates else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.workspace_floats:
        workspace = torch.empty(plan.workspace_floats, dtype=torch.float32, device=q.device)
        counters = _counters.take(plan.counters, q) if call.counters is None else call.counters
        met = (workspace.data_ptr(), counters.data_ptr())
    else:
        met = (0, 0)
    pointers = (*(t.data_ptr() for t in given), *guide, y.data_ptr(), *met)
    strides = (q.stride(0), *kv_stride, kv_heads * context * head)
    sizes = (kv_heads, q.shape[1] // kv_heads, context, *scores_arguments(call))
    plan.kernel.launch(q.shape[0], (*pointers, *absmax, *strides, *sizes, *last), current_stream(q.get_device()))
    return y


def _plan_for(form: Form, call: DecodeAttentionOp | AppendAttentionOp) -> AttentionPlan:
    """The plan for the call's shape, in which batch and context or reach too decide the kernel and its parts."""
    q, keys = call.q, call.keys
    (_, kv_heads, context, _), window = keys.shape, seen_through(call)
    places = min(window or context, call.reach or context)
    options = (window > 0, call.softcap > 0, call.ring > 0, call.sinks is not None)
    steps: tuple[bool, bool, int, RowsRotation | None] = (False, False, 1, None)
    if isinstance(call, AppendAttentionOp):
        rotation = None
        if call.operands is not None:
            columns = q.shape[1] * q.shape[2]
            group = min(call.group_size, columns)
            if Geometry(columns, group).k_padded == columns:  # the kernel writes no padding
                rotation = RowsRotation(DTYPES[q.dtype], group, len(call.seeds or ()))
        steps = (len(call.norms) > 0, call.early_read, call.rows, rotation)
    types, shapes = (q.dtype, keys.dtype, call.values.dtype), (q.shape, kv_heads, places)
    key = (form, *types, *shapes, options, *steps, q.get_device())
    return _attention_plans[key]


@PlanCache
def _attention_plans(
    form: Form,
    dtype: torch.dtype,
    cache: torch.dtype,
    values: torch.dtype,
    q: torch.Size,
    kv_heads: int,
    places: int,
    options: tuple[bool, bool, bool, bool],
    norms: bool,
    early_read: bool,
    rows: int,
    rotation: RowsRotation | None,
    device: int,
) -> AttentionPlan:
    if torch.uint8 in (cache, values) and dtype is torch.float32:
        raise DtypeError("qcut: attention's q is float32; allowed with a 4-bit cache on a GPU: float16, bfloat16")
    (tokens, heads, head), gpu = q, target(device)
    queries, batch = heads // kv_heads, tokens // rows

    desc, parts = select_attention(
        DTYPES[dtype],
        DTYPES[cache],
        head,
        queries,
        gpu,
        batch=batch,
        kv_heads=kv_heads,
        context=places,
        values=values_beside(cache, values),
        scores=Scores(*options),
    )
    step: AttentionAppend | AttentionAppendTokens | None = None
    rotates = False
    if form != "read" and isinstance(desc, AttentionMma):
        rotary = form == "rotate_and_append"
        norms = norms and ahead_of_time.has_head_norms(head, rotary, gpu)
        # Without dependent launch nothing begins early; a wheel brings the kernels that every caller may have.
        early_read = early_read and has_pdl(gpu) and not gpu.ahead_of_time
        one = AttentionAppend(desc, rotary, norms, early_read)
        rotates = rotation is not None and not gpu.ahead_of_time and one.can_rotate(rotation, queries)
        if rotates:
            one = replace(one, rotation=rotation)
        if rows == 1:
            step = one
        elif not gpu.ahead_of_time and AttentionAppendTokens.is_legal(one, rows):
            step = AttentionAppendTokens(one, rows)
    appends = step is not None
    norms = norms and appends
    source = (step or desc).emit()
    whole = step if isinstance(step, AttentionAppendTokens) else desc
    grid = whole.grid(batch, kv_heads, queries, parts)
    kernel = LaunchSpec(source, lambda m: grid, pdl=pdl(device)).load(device)
    floats = whole.workspace_floats(batch, kv_heads, queries, parts)
    return AttentionPlan(kernel, floats, grid[1] * batch if floats else 0, appends, norms, rotates and appends)
