"""`qcut.ops.attention.prefill` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.backends.cuda.attention import scores_arguments, seen_through
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, pdl, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.dispatch.attention import select_prompt_attention
from qcut.emitters.attention.prompt import tiles
from qcut.emitters.attention.scores import Scores
from qcut.numerics import int4, int8
from qcut.ops.attention.cache import dequantized, mixed_values, seen, unrolled
from qcut.ops.attention.prefill import PromptAttentionOp
from qcut.ops.registry import serves

_IN_TORCH = "torch"


@serves(PromptAttentionOp)
def prompt_attention(call: PromptAttentionOp) -> Tensor:
    call.check()
    q, cache = call.q, call.cache
    (count, heads, head), (_, kv_heads, context, _) = q.shape, cache.keys.shape
    if count == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    key = (
        q.dtype,
        cache.keys.dtype,
        cache.values.dtype,
        head,
        count,
        call.length,
        heads,
        kv_heads,
        context,
        seen_through(call),
        call.softcap > 0,
        call.ring,
        call.sinks is not None,
        q.get_device(),
    )
    plan = _plans[key]
    stored = cache.keys.data_ptr() | cache.values.data_ptr()
    for scales in cache.scales:
        stored |= scales.data_ptr() % 4
    if isinstance(plan, str) or not call.scale > 0 or stored % 16:
        y = _in_torch(call)
        int8.raise_absmax(call.absmax, y)
        return y
    if (q.data_ptr() | q.stride(0) * q.element_size()) % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    places = [call.starts.contiguous(), call.lengths.contiguous()]
    given = [q, *cache[:2], *cache.scales, *places, y]
    absmax = 0 if call.absmax is None else call.absmax.data_ptr()
    sizes = (count // call.length, call.length, kv_heads, heads // kv_heads, context)
    arguments = (*(t.data_ptr() for t in given), absmax, q.stride(0), *sizes, *scores_arguments(call))
    plan.launch(count, arguments, current_stream(q.get_device()))
    return y


@PlanCache
def _plans(
    dtype: torch.dtype,
    keys: torch.dtype,
    values: torch.dtype,
    head: int,
    count: int,
    length: int,
    heads: int,
    kv_heads: int,
    context: int,
    window: int,
    capped: bool,
    ring: int,
    sunk: bool,
    device: int,
) -> LaunchPlan | str:
    gpu, sequences, group = target(device), count // length, heads // kv_heads
    shape = {"sequences": sequences, "length": length, "kv_heads": kv_heads, "group": group}
    value_dtype = None if values is keys else DTYPES[values]
    read = min(ring or context, window + length) if window else context
    options = {"context": read, "values": value_dtype, "scores": Scores(window > 0, capped, ring > 0, sunk)}
    desc = select_prompt_attention(DTYPES[dtype], DTYPES[keys], head, gpu, **shape, **options)  # type: ignore[arg-type]
    if desc is None or (ring and context % desc.keys):
        return _IN_TORCH
    grid = desc.grid(tiles(desc.rows, **shape), gpu.sm_count)
    return LaunchSpec(desc.emit(), lambda m: grid, pdl=pdl(device)).load(device)


def _in_torch(call: PromptAttentionOp) -> Tensor:
    """Torch's attention over the whole context with a mask: types and sizes that no kernel takes."""
    q, length, context = call.q, call.length, call.ring or call.keys.shape[2]
    cache = unrolled(call.cache, context) if call.ring else call.cache
    sequences = len(q) // length
    starts = call.starts.clamp(0, context)
    lengths = torch.minimum(call.lengths.clamp(0, length), context - starts)
    places, tokens = (
        torch.arange(context, device=q.device, dtype=torch.int64),
        torch.arange(length, device=q.device, dtype=torch.int64),
    )
    held = (places < (starts + lengths)[:, None])[:, None, :, None]
    dtype = cache.reading(q.dtype, call.sinks)
    kept = []
    for rows, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        floats = dequantized(rows, scales, sequences, context, dtype)
        kept.append(torch.where(held, floats, 0))
    keys, values = kept
    own = (starts[:, None] + tokens).clamp(max=context - 1)[:, None, :, None]  # a row sees one place at least
    queries = q.unflatten(0, (sequences, length)).transpose(1, 2).to(dtype)
    mask = seen(places, own, call.window)
    mixed = mixed_values(queries, keys, values, mask, call.scale, call.softcap, call.sinks)
    if cache.has_rotated_values:
        mixed = int4.rotate_back(mixed)
    mixed = mixed.to(q.dtype)
    real = (tokens < lengths[:, None])[..., None, None]
    return torch.where(real, mixed.transpose(1, 2), 0).flatten(0, 1).contiguous()
