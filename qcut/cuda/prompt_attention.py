"""`qcut.ops.prompt_attention` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.numerics import int8
from qcut.ops.prompt_attention import PromptAttention
from qcut.ops.registry import serves


@serves(PromptAttention)
def prompt_attention(call: PromptAttention) -> Tensor:
    call.check()
    if call.q.shape[0] == 0:
        return torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    y = _in_torch(call)
    int8.raise_absmax(call.absmax, y)
    return y


def _in_torch(call: PromptAttention) -> Tensor:
    """Torch's attention over the whole context with a mask: types and sizes that no kernel takes."""
    q, cache, length = call.q, call.cache, call.length
    (count, heads, _), (_, kv_heads, context, _) = q.shape, cache.keys.shape
    sequences = count // length
    starts = call.starts.clamp(0, context)
    lengths = torch.minimum(call.lengths.clamp(0, length), context - starts)
    places, tokens = torch.arange(context, device=q.device), torch.arange(length, device=q.device)
    held = (places < (starts + lengths)[:, None])[:, None, :, None]
    kept = []
    for rows, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        rows = rows[:sequences]
        floats = rows if scales is None else (rows.float() * scales[:sequences, ..., None]).to(q.dtype)
        kept.append(torch.where(held, floats, 0).repeat_interleave(heads // kv_heads, 1))
    keys, values = kept
    seen = places <= (starts[:, None] + tokens)[:, None, :, None]  # place 0 always: no row is empty
    mixed = F.scaled_dot_product_attention(
        q.unflatten(0, (sequences, length)).transpose(1, 2), keys, values, attn_mask=seen, scale=call.scale
    )
    real = (tokens < lengths[:, None])[..., None, None]
    return torch.where(real, mixed.transpose(1, 2), 0).flatten(0, 1).contiguous()
