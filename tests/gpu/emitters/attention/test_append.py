"""A decoder's step in one launch: bitwise what the launches of its two parts store and return."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.append import RotateAndAppend
from qcut.numerics import int8 as numerics
from tests.gpu.support.launching import Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same

F16, BF16, S8 = DType.F16, DType.BF16, DType.S8
HEADS = ((F16, F16, 16, 1), (BF16, BF16, 64, 3), (F16, F16, 80, 12), (F16, F16, 128, 4), (BF16, BF16, 256, 8))
HEADS += ((BF16, S8, 32, 1), (F16, S8, 96, 12), (F16, S8, 128, 4), (BF16, S8, 256, 2))
CLUSTERED = [1, 2, 4, 8] if torch.cuda.is_available() and arch() == "sm_90a" else [1]
KV_HEADS, CONTEXT = 2, 201
PLACES = ((0, 0), (1, 1), (15, 15), (16, 16), (17, 17), (63, 63), (128, 128), (199, 199))
PLACES += ((199, 200), (40, 7), (90, 89), (5, 60))
"""Positions and slots. Sequences that have ended write past what they read; nothing else would write elsewhere."""


def caches(x: DType, cache: DType, head: int) -> list[Tensor]:
    """Keys, values and, of s8, their scales: what is not written yet is NaN, or 127."""
    generator = torch.Generator().manual_seed(head)
    kv = torch.randn(2, len(PLACES), KV_HEADS, CONTEXT, head, generator=generator).to(TORCH_DTYPE[x])
    scales = torch.empty(2, 0)
    if cache is S8:
        kv, scales = numerics.quantize_per_token_ref(kv.reshape(-1, head).float(), head)
        kv, scales = (t.view(2, len(PLACES), KV_HEADS, CONTEXT, *t.shape[1:]) for t in (kv, scales))
    for b, (position, slot) in enumerate(PLACES):
        for rows in (slice(slot, slot + 1), slice(position + 1, None)):
            kv[:, b, :, rows] = 127 if cache is S8 else math.nan
            if cache is S8:
                scales[:, b, :, rows] = math.nan
    return [*kv.contiguous().to(DEVICE), *(scales.contiguous().to(DEVICE) if cache is S8 else ())]


def append(
    x: DType,
    cache: DType,
    head: int,
    queries: int,
    rotary: bool,
    parts: int,
    cluster: int,
    tokens: int = 1 << 20,
    settled: bool = False,
    scores: Scores = PLAIN,
) -> None:
    attention = AttentionMma.for_shape(x, cache, head, queries, arch(), cluster, scores=scores).shortened(tokens)
    fused, rotate = (
        AttentionAppend(attention, rotary, settled=settled),
        RotateAndAppend(x, cache, head, "half" if rotary else "none", arch(), aligned=False),
    )
    batch, dtype, width = len(PLACES), TORCH_DTYPE[x], KV_HEADS * queries * head
    q, k, v = (torch.randn(batch, n).to(dtype).to(DEVICE) for n in (width + 5, *[KV_HEADS * head + 3] * 2))
    v[1, head:], v[2, :head] = 0, 2.0**-9 * v[2, :head]
    tables = [*torch.randn(2, CONTEXT, head).to(dtype).to(DEVICE)] if rotary else []
    positions, slots = torch.tensor(PLACES, dtype=torch.int32, device=DEVICE).t().contiguous()
    workspace = torch.empty(max(1, attention.workspace_floats(batch, KV_HEADS, queries, parts)), device=DEVICE)
    counters = torch.zeros(batch * KV_HEADS * -(-queries // attention.group), dtype=torch.int32, device=DEVICE)
    grid, scale = attention.grid(batch, KV_HEADS, queries, parts), 1.5 * head**-0.5
    strides, sizes = (q.stride(0), k.stride(0)), (KV_HEADS, queries, CONTEXT)
    sinks = [torch.linspace(-4, 9, KV_HEADS * queries, device=DEVICE)] * scores.sinks

    out, kept, rotated = Guarded(batch, width, dtype), caches(x, cache, head), q.clone()
    where = [*tables, positions, slots] if rotary else [slots]
    heads = (KV_HEADS * CONTEXT * head, KV_HEADS * queries * rotary, KV_HEADS, CONTEXT, batch, 1)
    launch(
        rotate.emit(),
        rotate.grid(batch, KV_HEADS * queries * rotary, KV_HEADS),
        *(rotated, k, v, *where, *kept, *strides, *heads),
    )
    given = (rotated, *kept, positions, out.tensor, workspace, counters)
    launch(attention.emit(), grid, *given, strides[0], KV_HEADS * CONTEXT * head, *sizes, scale, *sinks)
    want = out.take(width)
    assert not want.isnan().any()

    largest = torch.full((batch,), 1e-9)
    numerics.raise_absmax(largest, want)
    for absmax in (None, torch.full((batch,), 1e-9, device=DEVICE)):
        out, new, untouched = Guarded(batch, width, dtype), caches(x, cache, head), q.clone()
        given = (untouched, k, v, *tables, positions, slots, *new, out.tensor, workspace.fill_(math.nan), counters)
        where = 0 if absmax is None else absmax
        launch(fused.emit(), grid, *given, where, *strides, KV_HEADS * CONTEXT * head, *sizes, scale, *sinks)
        if absmax is not None:
            assert_same(absmax.cpu(), largest)
        assert_same(out.take(width), want)
        assert_same(untouched, q)
        for got, expected in zip(new, kept, strict=True):
            assert_same(got, expected)
        assert not counters.any()


@pytest.mark.parametrize(("x", "cache", "head", "queries"), HEADS)
@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("rotary", [False, True])
def test_one_launch_is_two(x: DType, cache: DType, head: int, queries: int, parts: int, rotary: bool) -> None:
    append(x, cache, head, queries, rotary, parts, 1)


@pytest.mark.parametrize(("x", "cache", "head", "queries"), HEADS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("settled", [False, True])
def test_one_launch_with_sinks_is_two(
    x: DType, cache: DType, head: int, queries: int, parts: int, settled: bool
) -> None:
    append(x, cache, head, queries, True, parts, 1, settled=settled, scores=Scores(sinks=True))


@pytest.mark.parametrize(("x", "cache", "head", "queries"), HEADS)
@pytest.mark.parametrize("tokens", [64, 128])
def test_one_launch_is_two_of_few_tiles(x: DType, cache: DType, head: int, queries: int, tokens: int) -> None:
    append(x, cache, head, queries, True, 1, 1, tokens)


@pytest.mark.parametrize("cache", [F16, S8])
@pytest.mark.parametrize("cluster", CLUSTERED)
@pytest.mark.parametrize("settled", [False, True])
def test_one_launch_is_two_where_parts_meet_in_a_cluster(cache: DType, cluster: int, settled: bool) -> None:
    for queries in (4, 12):
        for scores in (PLAIN, Scores(sinks=True)):
            append(F16, cache, 128, queries, True, cluster, cluster, settled=settled, scores=scores)
