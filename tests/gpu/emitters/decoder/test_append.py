"""Rotary positions and the cache, bitwise: steps and prompts, rows anywhere, every size of head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers)
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.append import MANY_TOKENS, ROTARY, Rotary, RotateAndAppend
from qcut.numerics import int8 as numerics
from tests.gpu.support.launching import Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
HEADS = (2, 6, 8, 40, 64, 96, 128, 250, 256)
BATCHES = ((3, 1), (2, 19), (1, 1))
"""Sequences, and tokens of each."""


def turned(rows: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Rotary positions of ``[tokens, heads, head]``, as eager models compute them."""
    pairs = rows.unflatten(-1, (2, -1) if rotary == "half" else (-1, 2))
    dim = -2 if rotary == "half" else -1
    first, second = pairs.unbind(dim)
    return rows * cos[:, None] + torch.stack((-second, first), dim).flatten(-2) * sin[:, None]


def tables_of(context: int, head: int, rotary: Rotary, dtype: torch.dtype, generator: Any = None) -> Tensor:
    """Cosines and sines ``[2, context, head]``, the same for both columns of a pair."""
    half = torch.randn(2, context, head // 2, generator=generator).to(dtype)
    return half.repeat_interleave(2, -1) if rotary == "interleaved" else torch.cat((half, half), -1)


def check(desc: RotateAndAppend, batch: int, length: int, heads: int = 5, kv_heads: int = 2, context: int = 23) -> None:
    """Launch into guarded memory, on rows with something between them; slots and positions are in no order."""
    head, dtype, tokens = desc.head, TORCH_DTYPE[desc.x], batch * length
    generator = torch.Generator().manual_seed(head + length)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        stride = count * head + (16 if desc.aligned else 5)
        stored = torch.randn(tokens, stride, generator=generator).to(dtype)
        stored[tokens // 2, head * (count - 1) : count * head] = 0  # a scale of 1
        return stored, stored[:, : count * head].reshape(tokens, count, head)

    (q_stored, q), (k_stored, k), (v_stored, v) = (rows(n) for n in (heads, kv_heads, kv_heads))
    cos, sin = tables_of(context, head, desc.rotary, dtype, generator)
    slots = torch.stack([torch.randperm(context, generator=generator)[:length] for _ in range(batch)]).flatten()
    positions = torch.randint(0, context, (tokens,), generator=generator)
    int8 = desc.cache is S8
    stored = torch.int8 if int8 else dtype
    keys, values = (Guarded(batch * kv_heads * context, head, stored) for _ in range(2))
    scales = torch.full((2, batch, kv_heads, context), -1.0, device=DEVICE)
    rotated, queries = q_stored.to(DEVICE, copy=True), 0 if desc.rotary == "none" else heads
    tables = [cos.to(DEVICE), sin.to(DEVICE), positions.int().to(DEVICE)] if queries else []
    caches = [keys.tensor, values.tensor, *(scales if int8 else ())]
    strides = (q_stored.stride(0), k_stored.stride(0), kv_heads * context * head)
    given = [rotated, k_stored.to(DEVICE), v_stored.to(DEVICE), *tables, slots.int().to(DEVICE), *caches]
    sizes = (queries, kv_heads, context, tokens, length)
    launch(desc.emit(), desc.grid(tokens, queries, kv_heads), *given, *strides, *sizes)

    want_q = q_stored.clone()
    if queries:
        want_q[:, : heads * head] = turned(q, cos[positions], sin[positions], desc.rotary).flatten(1)
        k = turned(k, cos[positions], sin[positions], desc.rotary)
    assert_same(rotated.cpu(), want_q)
    untouched = Guarded(batch * kv_heads * context, head, stored).take(head)
    for i, (cache, new) in enumerate(((keys, k), (values, v))):
        want = untouched.clone().view(batch, kv_heads, context, head)
        want_scale = torch.full((batch, kv_heads, context), -1.0)
        for token, slot in enumerate(slots.tolist()):
            if int8:
                kept = numerics.quantize_per_token_ref(new[token].float(), head)
                want[token // length, :, slot], want_scale[token // length, :, slot] = kept
            else:
                want[token // length, :, slot] = new[token]
        assert_same(cache.take(head), want.view(-1, head))
        assert_same(scales[i].cpu(), want_scale)


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("head", HEADS)
def test_positions_are_rotated_and_keys_and_values_kept(x: DType, int8: bool, rotary: Rotary, head: int) -> None:
    for many in (False, True):
        for aligned in (False, True):
            desc = RotateAndAppend(x, S8 if int8 else x, head, rotary, arch(), many, aligned)
            for batch, length in BATCHES:
                check(desc, batch, length)


@pytest.mark.parametrize("heads", [1, 3, 40, 71])
def test_any_number_of_heads(heads: int) -> None:
    for many in (False, True):
        check(RotateAndAppend(F16, S8, 64, "half", arch(), many), 2, 3, heads, 1)
        check(RotateAndAppend(F16, F16, 64, "interleaved", arch(), many), 2, 3, heads, heads)


def test_what_is_not_finite_stays_in_its_head() -> None:
    head, kv_heads, context = 64, 3, 4
    k, v = torch.randn(2, 2, kv_heads, head).half()
    k[0, 1, 3], v[1, 2, 60] = float("nan"), float("inf")
    for many in (False, True):
        desc = RotateAndAppend(F16, S8, head, "none", arch(), many)
        keys, values = (torch.full((2, kv_heads, context, head), 9, dtype=torch.int8, device=DEVICE) for _ in range(2))
        scales = torch.zeros(2, 2, kv_heads, context, device=DEVICE)
        slots = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
        given = (k.to(DEVICE), k.to(DEVICE), v.to(DEVICE), slots, keys, values, *scales)
        sizes = (kv_heads * head, kv_heads * head, kv_heads * context * head, 0, kv_heads, context, 2, 1)
        launch(desc.emit(), desc.grid(2, 0, kv_heads), *given, *sizes)
        for cache, scale, rows in ((keys, scales[0], k), (values, scales[1], v)):
            want, want_scale = numerics.quantize_per_token_ref(rows.reshape(-1, head).float(), head)
            assert_same(cache[:, :, 1].cpu().reshape(-1, head), want)
            assert_same(scale[:, :, 1].cpu().flatten(), want_scale)


# ── the operator ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize(
    ("batch", "length", "first", "head", "offset"),
    [(3, 1, 0, 64, 0), (2, MANY_TOKENS, 1, 64, 0), (3, 100, 0, 40, 1), (1, 700, 2, 128, 0)],
)
def test_views_of_one_product(
    dtype: torch.dtype, int8: bool, rotary: Rotary, batch: int, length: int, first: int, head: int, offset: int
) -> None:
    """Bitwise the operator on the CPU; queries, keys and values are parts of the same rows."""
    heads, kv_heads, context, tokens = 6, 2, length + 5, batch * length
    width = (heads + 2 * kv_heads) * head
    qkv = torch.randn(tokens * width + offset).to(dtype)
    tables = tables_of(context, head, rotary, dtype)
    shape = (2, batch + first, kv_heads, context)
    caches = torch.zeros(*shape, head).to(torch.int8 if int8 else dtype)
    scales = torch.zeros(shape)
    places = torch.arange(length, dtype=torch.int32).repeat(batch)
    results = []
    for device in ("cpu", DEVICE):
        rows, kept, kept_scales = (t.to(device, copy=True) for t in (qkv, caches, scales))
        q, k, v = rows[offset:].view(tokens, -1, head).split((heads, kv_heads, kv_heads), 1)
        cos, sin = (None, None) if rotary == "none" else tables.to(device)
        given: list[Any] = [q, k, v, cos, sin, places.to(device), places.to(device), *(t[first:] for t in kept)]
        given += [t[first:] for t in kept_scales] if int8 else [None, None]
        torch.ops.qcut.append_kv(*given, length, rotary == "interleaved")
        results.append([t.cpu() for t in (rows, kept, kept_scales)])
    for want, got in zip(*results, strict=True):
        assert_same(got, want)
