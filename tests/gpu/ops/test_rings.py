"""Attention over caches that are rings on CUDA: bitwise that over a row for every place, in every form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import prompt_attention as prompt_attention_cuda
from qcut.backends.cuda.launch.plans import forget_plans
from qcut.dispatch.attention import PromptKernel
from qcut.dispatch.gpus import Target
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.core.source import DType
from qcut.engine.kv_cache.cache import KV_DTYPES, KVCache, KVDtype, Memory
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

OPS = torch.ops.qcut
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PLACES, KV_HEADS = 3000, 2
"""Of a sequence, and heads of keys of a token."""
FORMS: list[tuple[torch.dtype, KVDtype, int, int]] = [
    *((F16, kind, 128, 4) for kind in KV_DTYPES),
    (BF16, "auto", 64, 3),
    (BF16, "int8/int4", 64, 3),
    (F16, "auto", 256, 2),
    (BF16, "int8", 256, 8),
    (F16, "int8", 96, 1),
    (F32, "auto", 64, 2),
]
"""Types, and the columns and number of queries of a head of keys."""


def rows_of(head: int) -> int:
    """Of a ring: whole blocks of the keys of a prompt."""
    return 768 if head <= 128 else 1280


def random_rows(dtype: torch.dtype, count: int, head: int, queries: int) -> list[Tensor]:
    """Queries, keys and values of tokens, in one projection."""
    heads = [KV_HEADS * queries, KV_HEADS, KV_HEADS]
    projected = torch.randn(count, sum(heads) * head, device=DEVICE).to(dtype)
    return [part.unflatten(1, (-1, head)) for part in projected.split([n * head for n in heads], 1)]


def whole_cache(dtype: torch.dtype, kind: KVDtype, head: int, sequences: int) -> Memory:
    """A row for every place, each with something in it."""
    place = {"dtype": dtype, "device": torch.device(DEVICE)}
    cache = KVCache(1, sequences, KV_HEADS, PLACES, head, kv_dtype=kind, **place)  # type: ignore[arg-type]
    slots = torch.arange(PLACES, dtype=torch.int32, device=DEVICE).repeat(sequences)
    q, k, v = (t.contiguous() for t in random_rows(dtype, len(slots), head, 1))
    OPS.append_kv(q, k, v, None, None, slots, slots, *cache.layer(0), PLACES)
    return cache.layer(0)


def ring_of(whole: Memory, ends: Tensor, rows: int, other: float) -> Memory:
    """A ring of the last tokens before each sequence's end; ``other`` in rows without one, of floats."""
    found = []
    for part in whole:
        if part is None:
            found.append(None)
            continue
        ring = part.new_full((*part.shape[:2], rows, *part.shape[3:]), other if part.is_floating_point() else 5)
        for b, end in enumerate(ends.tolist()):
            places = torch.arange(max(0, end - rows), end, device=DEVICE)
            ring[b, :, places % rows] = part[b, :, places]
        found.append(ring)
    return tuple(found)  # type: ignore[return-value]


def sinks_of(queries: int) -> Tensor:
    return torch.linspace(-3, 5, KV_HEADS * queries, device=DEVICE)


def copied(memory: Memory) -> list[Tensor | None]:
    return [None if part is None else part.clone() for part in memory]


def positions_for(rows: int) -> Tensor:
    """The last place of each sequence: at edges of tiles and of the ring, and on the third way around."""
    edges = [around * rows + apart for around in (1, 2) for apart in (-17, -16, -1, 0, 1, 16)]
    return torch.tensor([0, 15, 16, *edges, PLACES - 1], dtype=torch.int32, device=DEVICE)


def tables(dtype: torch.dtype, head: int) -> list[Tensor]:
    return [*torch.randn(2, PLACES, head, device=DEVICE).to(dtype)]


@pytest.mark.parametrize(("dtype", "kind", "head", "queries"), FORMS)
def test_steps_are_those_without(dtype: torch.dtype, kind: KVDtype, head: int, queries: int) -> None:
    """Of one place, of parts of a tile, of a ring's every row; what is not seen is NaN where it can be."""
    torch.manual_seed(head)
    rows, rotary = rows_of(head), tables(dtype, head)
    positions = positions_for(rows)
    whole = whole_cache(dtype, kind, head, len(positions))
    rung = ring_of(whole, positions, rows, float("nan"))  # the step's own token is still to come
    step = (*random_rows(dtype, len(positions), head, queries), *rotary, positions, positions.clone())
    seen = ((1, 0.0), (16, 0.0), (17, 3.0), (333, 0.0), (rows - 1, 0.0), (rows, 0.0), (rows, 3.0))
    for (window, softcap), sinks in product(seen, (None, sinks_of(queries))):
        options: dict[str, Any] = {"scale": head**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
        mine, theirs = copied(rung), copied(whole)
        want = OPS.append_attention(*step, *theirs, **options)
        assert not want.isnan().any()
        assert_same(OPS.append_attention(*step, *mine, **options, ring=PLACES), want)
        for got, expected in zip(mine, theirs, strict=True):
            for b, position in enumerate(positions.tolist()):
                if got is not None and expected is not None:
                    assert_same(got[b, :, position % rows], expected[b, :, position])
        read = (step[0], *mine, positions, head**-0.5, None, window, softcap)
        assert_same(
            OPS.decode_attention(*read, PLACES, sinks=sinks),
            OPS.decode_attention(step[0], *theirs, positions, head**-0.5, None, window, softcap, sinks=sinks),
        )


@pytest.mark.parametrize("batch", [1, 3, 200])
@pytest.mark.parametrize(("dtype", "kind", "head", "queries"), FORMS)
def test_parts_of_a_window_are_those_without(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, batch: int
) -> None:
    """In a cluster, in a workspace, and without either, by the number of sequences."""
    torch.manual_seed(batch)
    rows = 1280
    positions = torch.randint(PLACES // 3, PLACES, (batch,), dtype=torch.int32, device=DEVICE)
    whole = whole_cache(dtype, kind, head, 3)
    whole = tuple(None if part is None else part[torch.arange(batch) % 3].contiguous() for part in whole)  # type: ignore
    rung = ring_of(whole, positions + 1, rows, float("nan"))
    q = random_rows(dtype, batch, head, queries)[0]
    for sinks in (None, sinks_of(queries)):
        want = OPS.decode_attention(q, *whole, positions, 0.1, None, 1200, sinks=sinks)
        assert_same(OPS.decode_attention(q, *rung, positions, 0.1, None, 1200, 0.0, PLACES, sinks=sinks), want)


@pytest.mark.parametrize(("dtype", "kind", "head", "queries"), FORMS)
def test_a_step_is_its_parts_wherever_the_new_token_goes(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int
) -> None:
    """To its own row, to one that is seen, to one that is not, and to none."""
    torch.manual_seed(head)
    rows, rotary = rows_of(head), tables(dtype, head)
    positions = positions_for(rows)
    rung = ring_of(whole_cache(dtype, kind, head, len(positions)), positions + 1, rows, 0.5)
    for apart in (0, -1, -40, 5, rows, 1 - rows):
        slots = (positions + apart).clamp(0, PLACES - 1)
        slots[::5], slots[3::5] = PLACES, -1  # some of their remainders are rows that are seen
        q, k, v = random_rows(dtype, len(positions), head, queries)
        mine, theirs, turned = copied(rung), copied(rung), q.clone()
        OPS.append_kv(turned, k, v, *rotary, positions, slots, *theirs, 1, False, None, PLACES)
        want = OPS.decode_attention(turned, *theirs, positions, 0.1, None, 333, 0.0, PLACES)
        options = {"scale": 0.1, "window": 333, "ring": PLACES}
        assert_same(OPS.append_attention(q, k, v, *rotary, positions, slots, *mine, **options), want)
        for got, expected in zip(mine, theirs, strict=True):
            assert (got is None and expected is None) or torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture(params=["chosen", "mma"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels of prompts that dispatch chooses, and those of every architecture."""

    def select(x: DType, cache: DType, head: int, target: Target, **shape: Any) -> PromptKernel | None:
        values = shape["values"]
        legal = PromptMma.is_legal(x, cache, head, target.arch, values)
        return PromptMma.for_shape(x, cache, head, target.arch, values, shape["scores"]) if legal else None

    if request.param == "mma":
        monkeypatch.setattr(prompt_attention_cuda, "select_prompt_attention", select)
    forget_plans()
    yield request.param
    forget_plans()


@pytest.mark.parametrize(("dtype", "kind", "head", "queries"), FORMS)
@pytest.mark.parametrize("length", [1, 65, 300])
def test_chunks_are_those_without(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, length: int, form: str
) -> None:
    """Chunks that begin and end at edges of blocks and of the ring, some padded, one empty."""
    torch.manual_seed(length)
    rows, rotary = rows_of(head), tables(dtype, head)
    starts = [0, 1, rows - length, rows - length // 2, rows - 1, rows, 2 * rows - 16, PLACES - length, 500]
    counts = [length] * 7 + [length - length // 3, 0]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    whole = whole_cache(dtype, kind, head, len(starts))
    rung = ring_of(whole, torch.tensor(starts), rows, 0.5)
    q, k, v = random_rows(dtype, length * len(starts), head, queries)
    places = torch.tensor(starts)[:, None] + torch.arange(length)
    slots = torch.where(torch.arange(length) < torch.tensor(counts)[:, None], places, PLACES)
    slots, positions = (t.flatten().int().to(DEVICE) for t in (slots, places.clamp(max=PLACES - 1)))
    turned = []
    for memory, ring in ((whole, 0), (rung, PLACES)):
        turned.append(q.clone())
        OPS.append_kv(turned[-1], k, v, *rotary, positions, slots, *memory, length, False, None, ring)
    assert_same(*turned)
    for part, expected in zip(rung, whole, strict=True):
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if part is not None and expected is not None and end > start:
                own = torch.arange(start, end, device=DEVICE)
                assert_same(part[b][:, own % rows], expected[b][:, own])
    first, tokens = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (starts, counts))
    seen = ((1, 0.0), (128, 0.0), (250, 2.0), (rows - length + 1, 0.0))
    for (window, softcap), sinks in product(seen, (None, sinks_of(queries))):
        results = []
        for memory, ring in ((whole, 0), (rung, PLACES)):
            absmax = torch.zeros(len(q), device=DEVICE)
            chunk = (first, tokens, head**-0.5, length, absmax, window, softcap, ring, sinks)
            results += [OPS.prompt_attention(turned[0], *memory, *chunk), absmax]
        want, largest, got, mine = results
        assert not want.isnan().any()
        if dtype is F32:  # torch's attention, in the order that torch likes
            assert sqnr_db(want.double().cpu(), got.double().cpu()) > 100
        else:
            assert_same(got, want)
            assert_same(mine, largest)


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_prompts_are_the_same_every_time(kind: KVDtype) -> None:
    """Also where other work, of other tests at the same time, holds up some warps of a CTA and not others."""
    torch.manual_seed(4)
    length, starts = 300, [0, 1, 468, 618, 767, 768, 1520, 2700, 500]
    memory = whole_cache(F16, kind, 128, len(starts))
    q = random_rows(F16, length * len(starts), 128, 4)[0]
    first = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    chunk = (first, torch.full_like(first, length), 128**-0.5, length, None, 469)
    want = OPS.prompt_attention(q, *memory, *chunk)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(500):
        differ += (OPS.prompt_attention(q, *memory, *chunk) != want).any()
    assert differ.item() == 0


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_rings_are_near_the_cpu(kind: KVDtype) -> None:
    """Also where a ring holds no whole blocks: torch's attention reads prompts then."""
    torch.manual_seed(0)
    length = 40
    starts = torch.tensor([0, 90, 700], dtype=torch.int32, device=DEVICE)
    for rows in (256, 250):
        whole = whole_cache(F16, kind, 64, 3)
        rung = ring_of(whole, starts + length, rows, 0.5)
        q = random_rows(F16, 3 * length, 64, 2)[0]
        tokens = torch.full_like(starts, length)
        given = (q, *rung, starts, tokens, 0.125, length, None, 100, 0.0, PLACES)
        want = OPS.prompt_attention(*(t.cpu() if isinstance(t, Tensor) else t for t in given))
        assert sqnr_db(want.double(), OPS.prompt_attention(*given).double().cpu()) > 35
        step = (q[:3], *rung, starts + length - 1, 0.125, None, 100, 0.0, PLACES)
        want = OPS.decode_attention(*(t.cpu() if isinstance(t, Tensor) else t for t in step))
        assert sqnr_db(want.double(), OPS.decode_attention(*step).double().cpu()) > 35
