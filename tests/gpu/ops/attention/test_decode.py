"""Attention over a cache on CUDA: near the CPU in every form, and right in graphs, whichever is replayed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.engine.kv_cache.cache import KV_DTYPES, KVCache, KVDtype
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

OP = torch.ops.qcut.decode_attention

# With one part of the context; with several that meet in a cluster; and in a workspace, which needs counters.
SIZES = ((torch.float16, 256, 100), (torch.float16, 1, 4096), (torch.float32, 1, 4096), (torch.bfloat16, 7, 1500))


def problem(dtype: torch.dtype, batch: int, context: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(context)
    q = torch.randn(batch, 4, 64, generator=generator).to(dtype)
    keys, values = torch.randn(2, batch, 2, context, 64, generator=generator).to(dtype)
    positions = torch.randint(context // 2, context, (batch,), generator=generator, dtype=torch.int32)
    return q, keys, values, None, None, positions, 0.125


def on_gpu(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in given)


@pytest.mark.parametrize(("dtype", "batch", "context"), SIZES)
def test_every_form_is_near_the_cpu(dtype: torch.dtype, batch: int, context: int) -> None:
    given = problem(dtype, batch, context)
    got = OP(*on_gpu(given))
    assert sqnr_db(OP(*given).double(), got.cpu().double()) > {2: 35, 4: 90}[dtype.itemsize]
    counters = torch.zeros(4 * batch, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        assert_same(OP(*on_gpu(given), counters), got)
    assert not counters.any()


@pytest.mark.parametrize(("dtype", "batch", "context"), SIZES)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (37, 0.0), (1000, 0.0), (0, 1.5), (50, 0.75)])
@pytest.mark.parametrize("head", [64, 256])
@pytest.mark.parametrize("sunk", [False, True])
def test_windows_softcaps_and_sinks_are_the_cpus(
    dtype: torch.dtype, batch: int, context: int, window: int, softcap: float, head: int, sunk: bool
) -> None:
    """By itself and in a step, with the new row in the window, before it and behind it."""
    generator = torch.Generator().manual_seed(context)
    q = torch.randn(batch, 4, head, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, 2, head, generator=generator).to(dtype)
    cache = torch.randn(2, batch, 2, context, head, generator=generator).to(dtype)
    positions = torch.randint(context // 2, context, (batch,), generator=generator, dtype=torch.int32)
    options = {"scale": head**-0.5, "window": window, "softcap": softcap}
    sinks = (torch.tensor([0.5, -3.0, 4.0, 9.0]), torch.tensor([0.5, -3.0, 4.0, 9.0], device=DEVICE))
    of_cpu, of_gpu = ({"sinks": logits} if sunk else {} for logits in sinks)
    least = {2: 35, 4: 90}[dtype.itemsize]
    want = OP(q, *cache, None, None, positions, **options, **of_cpu)
    got = OP(*on_gpu((q, *cache, None, None, positions)), **options, **of_gpu)
    assert sqnr_db(want.double(), got.cpu().double()) > least
    for back in (0, 3, 40):
        slots = (positions - back).clamp(min=0)
        given = (q, k, v, None, None, positions, slots, *cache.clone(), None, None)
        there = on_gpu(given)
        want = torch.ops.qcut.append_attention(*given, **options, **of_cpu)
        got = torch.ops.qcut.append_attention(*there, **options, **of_gpu)
        assert sqnr_db(want.double(), got.cpu().double()) > least
        for mine, theirs in zip(given[7:9], there[7:9], strict=True):
            assert torch.equal(mine, theirs.cpu())


@pytest.mark.parametrize(("dtype", "batch", "context"), SIZES)
def test_sinks_far_below_and_above_all_scores(dtype: torch.dtype, batch: int, context: int) -> None:
    """Minus infinity is no sink, bit by bit; a sink beyond all scores leaves zeros, and no NaN."""
    given = on_gpu(problem(dtype, batch, context))
    for low in (float("-inf"), -1e4):
        assert_same(OP(*given, sinks=torch.full((4,), low, device=DEVICE)), OP(*given))
    for high in (300.0, 1e4):
        got = OP(*given, sinks=torch.tensor([0.0, high, high, 0.0], device=DEVICE))
        assert not got[:, 1:3].any()
        assert_same(got[:, [0, 3]], OP(*given, sinks=torch.zeros(4, device=DEVICE))[:, [0, 3]])


@pytest.mark.parametrize("batch", [1, 16, 256])
@pytest.mark.parametrize("head", [64, 128])
def test_sinks_go_with_rotary_positions_and_norms(batch: int, head: int) -> None:
    """Bitwise the step's parts: heads of eight queries, as GPT-OSS has them."""
    context, dtype = 1024, torch.bfloat16
    generator = torch.Generator(DEVICE).manual_seed(batch)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    q, k, v = random(batch, 16, head), random(batch, 2, head), random(batch, 2, head)
    tables, cache = (random(context, head), random(context, head)), random(2, batch, 2, context, head)
    places = torch.randint(0, context, (batch,), generator=generator, device=DEVICE, dtype=torch.int32)
    sinks = 3 * torch.randn(16, generator=generator, device=DEVICE)
    for window in (0, 128):
        for norms in ({}, {"query_norm": random(head), "key_norm": random(head), "eps": 1e-5}):
            theirs, turned, keys = cache.clone(), q.clone(), k
            if norms:
                turned, keys = (
                    torch.ops.qcut.add_norm(x.reshape(-1, head), None, norms[name], None, False, 1e-5)[1].view(x.shape)
                    for x, name in ((q, "query_norm"), (k, "key_norm"))
                )
            torch.ops.qcut.append_kv(turned, keys, v, *tables, places, places, *theirs, None, None)
            want = OP(turned, *theirs, None, None, places, 0.125, window=window, sinks=sinks)
            for attend in (torch.ops.qcut.append_attention.default, torch.ops.qcut.append_attention.early_read):
                mine = cache.clone()
                torch.cuda.synchronize()  # the promise of early_read
                step = (q, k, v, *tables, places, places, *mine, None, None, 0.125)
                assert_same(attend(*step, window=window, sinks=sinks, **norms), want)
                assert_same(mine, theirs)


@pytest.mark.parametrize(("dtype", "batch", "context"), SIZES)
def test_graphs_without_counters_may_be_replayed_in_any_order(dtype: torch.dtype, batch: int, context: int) -> None:
    given = on_gpu(problem(dtype, batch, context))
    want = OP(*given)
    graphs, results = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([OP(*given), OP(*given)])
        graphs.append(graph)
    for i in (1, 0, 1, 1):
        graphs[i].replay()
        torch.cuda.synchronize()
        for got in results[i]:
            assert_same(got, want)
            got.fill_(float("nan"))
    assert_same(OP(*given), want)


@pytest.mark.parametrize(("dtype", "batch", "context"), SIZES)
def test_positions_out_of_range_read_the_nearest(dtype: torch.dtype, batch: int, context: int) -> None:
    *given, positions, scale = on_gpu(problem(dtype, batch, context))
    for outside, nearest in ((-3, 0), (context, context - 1), (2**31 - 2, context - 1)):
        want = OP(*given, torch.full_like(positions, nearest), scale)
        assert_same(OP(*given, torch.full_like(positions, outside), scale), want)


@pytest.mark.parametrize(("dtype", "batch", "context"), SIZES)
@pytest.mark.parametrize("cache", ["own", "int8"])
def test_tokens_without_a_place_are_not_stored(dtype: torch.dtype, batch: int, context: int, cache: str) -> None:
    q, keys, values, _, _, positions, scale = on_gpu(problem(dtype, batch, context))
    scales = (None, None)
    if cache == "int8":
        keys, values = torch.ones_like(keys, dtype=torch.int8), torch.ones_like(values, dtype=torch.int8)
        scales = torch.ones(2, *keys.shape[:3], device=DEVICE).unbind()
    k, v = torch.randn(2, batch, 2, 64, device=DEVICE).to(dtype)
    table = torch.ones(context, 64, device=DEVICE, dtype=dtype)
    stored = [keys, values, *(t for t in scales if t is not None)]
    before = [t.clone() for t in stored]
    want = OP(q, keys, values, *scales, positions, scale)
    for outside in (-1, context, -(2**31), 2**31 - 1):
        slots = torch.full_like(positions, outside)
        for rotary in ((None, None), (table, torch.zeros_like(table))):
            step = (q.clone(), k, v, *rotary, positions, slots, keys, values, *scales)
            assert_same(torch.ops.qcut.append_attention(*step, scale), want)
            torch.ops.qcut.append_kv(*step)
            for now, then in zip(stored, before, strict=True):
                assert torch.equal(now, then)


@pytest.mark.parametrize(("dtype", "kind"), [*((torch.float16, kind) for kind in KV_DTYPES), (torch.float32, "auto")])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_reach_is_a_cache_that_ends_there(dtype: torch.dtype, kind: KVDtype, batch: int) -> None:
    """Bitwise; and a sequence that goes beyond is read to its end."""
    context, reach = 4096, 257
    torch.manual_seed(batch)
    long = KVCache(1, batch, 2, context, 64, dtype=dtype, device=torch.device(DEVICE), kv_dtype=kind)
    short = KVCache(1, batch, 2, reach, 64, dtype=dtype, device=torch.device(DEVICE), kv_dtype=kind)
    rows = torch.randn(3, batch * context, 4, 64, device=DEVICE).to(dtype)
    places = torch.arange(context, dtype=torch.int32, device=DEVICE).repeat(batch)
    k, v = (t[:, :2].contiguous() for t in rows[1:])
    torch.ops.qcut.append_kv(rows[0], k, v, None, None, places, places, *long.layer(0), context)
    for to, given in zip(short.layer(0), long.layer(0), strict=True):
        if to is not None and given is not None:
            to.copy_(given[:, :, :reach])
    at = (torch.arange(batch, dtype=torch.int32, device=DEVICE) * 37 + 200) % reach
    step = (*(t[:batch] for t in (rows[0], k, v)), None, None)
    want = torch.ops.qcut.append_attention(*step, at, at, *short.layer(0), 0.125)
    assert_same(torch.ops.qcut.append_attention(*step, at, at, *long.layer(0), 0.125, reach=reach), want)
    far = at + 3000
    want = torch.ops.qcut.append_attention(*step, far, far, *long.layer(0), 0.125)
    got = torch.ops.qcut.append_attention(*step, far, far, *long.layer(0), 0.125, reach=reach)
    assert sqnr_db(want.double(), got.double()) > {2: 45, 4: 100}[dtype.itemsize]


def grown(early_read: bool, kind: KVDtype, batch: int, ring: int, sunk: bool) -> list[Tensor]:
    """Results of steps of growing sequences, one graph after another, and the cache after them."""
    places, device = 700, torch.device(DEVICE)
    torch.manual_seed(batch)
    given = torch.randn(60, batch, 8 * 64, device=device, dtype=torch.float16)
    tables = torch.randn(2, places, 64, device=device, dtype=torch.float16)
    options: dict[str, Any] = {"window": 100, "ring": places} if ring else {}
    if sunk:
        options["sinks"] = torch.tensor([0.5, -3.0, 4.0, 9.0], device=device)
    cache = KVCache(1, batch, 2, ring or places, 64, dtype=torch.float16, device=device, kv_dtype=kind)
    x, logits = torch.zeros_like(given[0]), torch.zeros(batch, 8, device=device)
    start = torch.arange(batch, dtype=torch.int32, device=device) * 37 % 300 + 350
    tokens, positions, slots = start.long(), start.clone(), start.clone()

    def step() -> Tensor:
        q, k, v = (t.unflatten(1, (-1, 64)) for t in torch.ops.qcut.silu_mul(x, x).split((256, 128, 128), 1))
        at = (*tables, positions, slots, *cache.layer(0))
        attend = torch.ops.qcut.append_attention
        overload = attend.early_read if early_read else attend.default
        y: Tensor = overload(q, k, v, *at, 0.125, **options)
        torch.ops.qcut.advance(logits, tokens, positions, slots, places)
        return y

    torch.cuda.synchronize()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for state in (positions, slots):
        state.copy_(start)
    found = []
    for row in given:
        x.copy_(row)
        graph.replay()
        found.append(y.clone())
    return [*found, *(t for t in cache.layer(0) if t is not None)]


@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize(("batch", "ring"), [(1, 0), (16, 0), (2, 384)])
@pytest.mark.parametrize("sunk", [False, True])
def test_early_reads_change_no_step(kind: KVDtype, batch: int, ring: int, sunk: bool) -> None:
    for got, want in zip(*(grown(early, kind, batch, ring, sunk) for early in (True, False)), strict=True):
        assert_same(got, want)
