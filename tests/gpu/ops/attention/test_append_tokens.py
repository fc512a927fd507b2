"""`append_attention` of several tokens of each sequence on CUDA: the operators one by one, and steps of one token."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.engine.kv_cache.cache import KVCache, KVDtype
from qcut.engine.kv_cache.ring_cache import Ring
from qcut.jit.waiting import dry_run_first
from qcut.numerics.codebook import tokens as rotated
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

OPS = torch.ops.qcut
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KV_HEADS = 2
FORMS: list[tuple[torch.dtype, KVDtype, int, int, int]] = [
    (F16, "auto", 128, 4, 2),
    (F16, "auto", 128, 4, 4),
    (F16, "int8", 128, 4, 4),
    (F16, "int4", 128, 4, 3),
    (F16, "int8/int4", 128, 4, 8),
    (BF16, "auto", 64, 8, 4),
    (BF16, "auto", 64, 1, 8),
    (BF16, "int8", 64, 1, 4),
    (BF16, "int8/int4", 64, 3, 4),
    (F16, "auto", 128, 12, 3),
    (F16, "auto", 256, 1, 8),
    (BF16, "int8", 256, 2, 4),
    (BF16, "auto", 256, 4, 4),
    (F16, "int4", 256, 8, 2),
    (F16, "auto", 256, 8, 8),  # new rows for which shared memory has no room: launches one by one
    (F32, "auto", 64, 2, 4),
]
"""Types, the columns and number of queries of a head of keys, and tokens of a sequence."""
STARTS = {120: (0, 1, 7, 8, 13, 14, 15, 16, 31, 60, 100, 112), 1500: (0, 777, 1490), 20_000: (15_995,)}
"""By places of a sequence, tokens before the new ones: with one part, in a cluster, in a workspace."""


class Step:
    """Tokens of some sequences, and caches that hold the tokens before them; the rest of a cache is NaN, or odd."""

    def __init__(
        self,
        dtype: torch.dtype,
        kind: KVDtype,
        head: int,
        queries: int,
        rows: int,
        starts: tuple[int, ...],
        context: int,
        ring: Ring | None = None,
    ) -> None:
        torch.manual_seed(head + rows + context)
        self.batch, self.rows, self.heads, self.context = len(starts), rows, KV_HEADS * queries, context
        place: dict[str, Any] = {"dtype": dtype, "device": torch.device(DEVICE), "kv_dtype": kind}
        cache = KVCache(1, self.batch, KV_HEADS, context + 1, head, rings=[ring], **place)
        self.memory = cache.layer(0)
        for part in self.memory:
            if part is not None:
                part.fill_(float("nan") if part.is_floating_point() else 127)
        start, many = torch.tensor(starts, dtype=torch.int32, device=DEVICE)[:, None], 250
        self.bound = 0 if ring is None else context
        for first in range(0, max(starts), many):
            at = torch.arange(first, first + many, dtype=torch.int32, device=DEVICE).expand(self.batch, -1)
            slots = torch.where(at < start, at, context + 1 if ring is None else context).flatten()
            q, k, v = self.random(dtype, len(slots), head, 1)
            OPS.append_kv(q, k, v, None, None, slots, slots, *self.memory, many, ring=self.bound)
        self.places = (start + torch.arange(rows, dtype=torch.int32, device=DEVICE)).flatten()
        self.tokens = self.random(dtype, self.batch * rows, head, queries)
        self.tables = [*torch.randn(2, context, head, device=DEVICE).to(dtype)]
        self.counters = torch.zeros(self.batch * rows * self.heads, dtype=torch.int32, device=DEVICE)

    @staticmethod
    def random(dtype: torch.dtype, count: int, head: int, queries: int) -> list[Tensor]:
        """Queries, keys and values of tokens, in one projection."""
        heads = [KV_HEADS * queries, KV_HEADS, KV_HEADS]
        projected = torch.randn(count, sum(heads) * head, device=DEVICE).to(dtype)
        return [part.unflatten(1, (-1, head)) for part in projected.split([n * head for n in heads], 1)]

    def copied(self) -> list[Tensor | None]:
        return [None if part is None else part.clone() for part in self.memory]

    def apart(self, slots: Tensor, norms: dict[str, Any], **options: Any) -> tuple[Tensor, list[Tensor | None]]:
        """The operators one by one: results, and the cache then."""
        (q, k, v), memory = self.tokens, self.copied()
        if norms:
            q, k = (
                OPS.add_norm(x.reshape(-1, x.shape[2]), None, norms[name], None, False, 1e-5)[1].view(x.shape)
                for x, name in ((q, "query_norm"), (k, "key_norm"))
            )
        q = q.clone()
        OPS.append_kv(q, k, v, *self.tables, self.places, slots, *memory, self.rows, ring=self.bound)
        y = torch.empty_like(q)
        for j in range(self.rows):
            at = self.places[j :: self.rows].contiguous()
            y[j :: self.rows] = OPS.decode_attention(q[j :: self.rows], *memory, at, 0.1, ring=self.bound, **options)
        return y, memory

    def together(
        self, slots: Tensor, norms: dict[str, Any], early_read: bool = False, **options: Any
    ) -> tuple[Tensor, list[Tensor | None], Tensor]:
        """One operator: results, the cache then, and largest magnitudes."""
        memory, q = self.copied(), self.tokens[0].clone()
        absmax = torch.zeros(len(q), device=DEVICE)
        given = (*self.tokens, *self.tables, self.places, slots, *memory, 0.1, self.counters, absmax)
        torch.cuda.synchronize()  # the promise of early_read
        attend = OPS.append_attention.early_read if early_read else OPS.append_attention
        y = attend(*given, ring=self.bound, rows=self.rows, **norms, **options)
        assert_same(self.tokens[0], q)
        assert not self.counters.any()
        return y, memory, absmax


def assert_same_caches(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        if mine is not None and theirs is not None:
            assert_same(mine, theirs)


def norms_of(dtype: torch.dtype, head: int) -> dict[str, Any]:
    weights = torch.rand(2, head, device=DEVICE).add(0.5).to(dtype)
    return {"query_norm": weights[0], "key_norm": weights[1], "eps": 1e-5}


def sinks_of(heads: int) -> Tensor:
    return torch.linspace(-3, 5, heads, device=DEVICE)


@pytest.mark.parametrize("context", STARTS)
@pytest.mark.parametrize(("dtype", "kind", "head", "queries", "rows"), FORMS)
def test_tokens_are_the_operators(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, rows: int, context: int
) -> None:
    step = Step(dtype, kind, head, queries, rows, STARTS[context], context)
    want, kept = step.apart(step.places, {})
    assert not want.isnan().any()
    for _ in range(2):
        got, memory, absmax = step.together(step.places, {})
        assert_same(got, want)
        assert_same_caches(memory, kept)
        assert_same(absmax, want.flatten(1).float().abs().amax(1))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"softcap": 2.0},
    {"window": 5000},
    {"window": 1},
    {"window": 16},
    {"window": 37},
)


@pytest.mark.parametrize(("dtype", "kind", "head", "queries", "rows"), [FORMS[i] for i in (1, 3, 5, 7, 11)])
@pytest.mark.parametrize(("context", "early_read"), [(120, False), (1500, False), (1500, True)])
def test_options_are_those_of_the_operators(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, rows: int, context: int, early_read: bool
) -> None:
    """Bitwise as long as a window leaves nothing out; sums of other windows have another order."""
    step = Step(dtype, kind, head, queries, rows, STARTS[context], context)
    norms, sinks = norms_of(dtype, head), {"sinks": sinks_of(step.heads)}

    def run() -> list[Any]:
        found = []
        for options, normed in product(OPTIONS[: 3 if early_read else None], (norms, {})):
            more = options if normed else options | sinks
            want, kept = step.apart(step.places, normed, **more)
            found.append((options, want, kept, *step.together(step.places, normed, early_read, **more)))
        return found

    for options, want, kept, got, memory, absmax in dry_run_first(run):
        assert_same_caches(memory, kept)
        assert_same(absmax, got.flatten(1).float().abs().amax(1))
        whole = step.places < options.get("window", context)
        assert_same(got[whole], want[whole])
        assert not got.isnan().any()
        for mine, theirs in zip(got.double(), want.double(), strict=True):
            assert sqnr_db(theirs, mine) > (40 if dtype is BF16 else 55)


@pytest.mark.parametrize(("dtype", "kind", "head", "queries", "rows"), [FORMS[i] for i in (1, 2, 3, 6, 8, 10, 13)])
def test_tokens_without_a_place_change_nothing(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, rows: int
) -> None:
    """The last tokens of each sequence, one after another; what the cache holds at their positions is NaN or odd."""
    context = 120
    step = Step(dtype, kind, head, queries, rows, STARTS[context], context)
    index = torch.arange(rows, device=DEVICE).repeat(step.batch)
    for count in range(1, rows):
        for outside in (context + 1, -1, 2**31 - 1):
            slots = torch.where(index < count, step.places, outside)
            want, kept = step.apart(slots, {})
            got, memory, absmax = step.together(slots, {})
            valid = index < count
            assert_same(got[valid], want[valid])
            assert_same(absmax[valid], want[valid].flatten(1).float().abs().amax(1))
            assert got.isfinite().all()
            assert_same_caches(memory, kept)


@pytest.mark.parametrize(("dtype", "kind", "head", "queries", "rows"), [FORMS[i] for i in (0, 2, 3, 4, 5, 6, 11)])
@pytest.mark.parametrize("early_read", [False, True])
def test_tokens_of_rings_are_those_without(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, rows: int, early_read: bool
) -> None:
    """Bitwise, before a ring is full, as new rows go around its end, and on the third way around."""
    count, context = 640 if head > 128 else 384, 3000
    starts = (0, 5, 15, *(count + apart for apart in (-17, -3, -1, 0, 1, 15)), 2 * count - 2, context - rows)
    whole, rung = (Step(dtype, kind, head, queries, rows, starts, context, ring) for ring in (None, Ring(100, count)))
    whole.tokens, whole.tables = rung.tokens, rung.tables
    for part, ring in zip(whole.memory, rung.memory, strict=True):
        if part is not None and ring is not None:
            for b, start in enumerate(starts):
                places = torch.arange(max(0, start - count), start, device=DEVICE)
                part[b, :, places] = ring[b, :, places % count]
    windows = ((1, 0.0, False), (16, 0.0, True), (100, 3.0, False), (count + 1 - rows, 0.0, False))

    def run() -> list[Any]:
        found = []
        for window, softcap, sunk in windows:
            options = {"window": window, "softcap": softcap, "sinks": sinks_of(whole.heads) if sunk else None}
            of_whole = whole.together(whole.places, {}, early_read, **options)
            found.append((*of_whole[:2], *rung.together(rung.places, {}, early_read, **options)[:2]))
        return found

    for want, kept, got, memory in dry_run_first(run):
        assert not want.isnan().any()
        assert_same(got, want)
        for mine, theirs in zip(memory, kept, strict=True):
            for b, place in enumerate(whole.places.view(-1, rows).tolist()):
                if mine is not None and theirs is not None:
                    places = torch.tensor(place, device=DEVICE)
                    assert_same(mine[b, :, places % count], theirs[b, :, places])


ROTATED: list[tuple[torch.dtype, KVDtype, int, int, int, int, tuple[int, ...]]] = [
    (F16, "auto", 128, 4, 1, 128, (1,)),
    (F16, "auto", 128, 4, 2, 128, (1,)),
    (F16, "auto", 128, 4, 3, 64, (1,)),
    (F16, "auto", 128, 4, 4, 128, (1, 2)),
    (F16, "auto", 128, 4, 8, 32, (1, 2)),
    (F16, "int8", 128, 4, 4, 128, (1,)),
    (F16, "int4", 128, 4, 3, 128, (1,)),  # values of 4 bits: a kernel of its own rotates
    (BF16, "auto", 64, 8, 1, 128, (1,)),  # a group of two heads
    (BF16, "auto", 64, 4, 4, 128, (1,)),
    (BF16, "int8", 64, 3, 2, 64, (1, 2)),
    (BF16, "auto", 64, 3, 2, 128, (1,)),  # groups that are not those of a CTA
    (F16, "auto", 32, 1, 3, 32, (1, 2)),  # blocks with padding, which a kernel of its own writes
    (F16, "auto", 128, 12, 2, 128, (1,)),
    (F16, "auto", 128, 9, 1, 128, (1,)),
    (F16, "auto", 64, 9, 2, 128, (1,)),
    (BF16, "auto", 256, 2, 4, 128, (1,)),
    (F16, "auto", 256, 8, 8, 128, (1,)),
]
"""Types, the columns and number of queries of a head of keys, tokens of a sequence, columns of a group, seeds."""


@pytest.mark.parametrize("context", STARTS)
@pytest.mark.parametrize(("dtype", "kind", "head", "queries", "rows", "group", "seeds"), ROTATED)
def test_results_are_rotated_in_their_kernel(
    dtype: torch.dtype,
    kind: KVDtype,
    head: int,
    queries: int,
    rows: int,
    group: int,
    seeds: tuple[int, ...],
    context: int,
) -> None:
    step = Step(dtype, kind, head, queries, rows, STARTS[context], context)
    signs = rotated.operands("hadamard", group, step.heads * head, seeds, dtype, DEVICE)
    turn = (signs, "hadamard", group, list(seeds), dtype)
    for options in ({}, {"window": 37}, {"sinks": sinks_of(step.heads)}):
        y, kept, _ = step.together(step.places, norms := norms_of(dtype, head), **options)
        want, _ = OPS.rotate_tokens(y.flatten(1), *turn)
        memory = step.copied()
        given = (*step.tokens, *step.tables, step.places, step.places, *memory, 0.1, step.counters)
        torch.cuda.synchronize()  # the promise of early_read
        got = OPS.append_attention.early_read(
            *given, rows=rows, operands=signs, group_size=group, seeds=list(seeds), **norms, **options
        )
        assert got.shape == want.shape
        count = len(y)
        for mine, theirs in zip(*(tokens_of(blocks, count) for blocks in (got, want)), strict=True):
            assert_same(mine, theirs)
        assert_same_caches(memory, kept)
        assert not step.counters.any()


def tokens_of(blocks: Tensor, count: int) -> Tensor:
    """Rows of blocks; those behind the last token are not written."""
    return blocks.flatten(1, 2)[:, :count]


@pytest.mark.parametrize(("dtype", "kind", "head", "queries", "rows"), [FORMS[i] for i in (1, 2, 3, 5, 6, 12)])
@pytest.mark.parametrize("context", [64, 700])
def test_steps_of_tokens_are_steps_of_one(
    dtype: torch.dtype, kind: KVDtype, head: int, queries: int, rows: int, context: int
) -> None:
    """From an empty cache on: bitwise the results, and the cache in the end. Some steps keep one token only."""
    step = Step(dtype, kind, head, queries, 1, (0, 0, 0), context)
    whole, apart = step.copied(), step.copied()
    starts, taken = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE), 0
    tokens = [t.unflatten(0, (-1, 3)) for t in step.random(dtype, 3 * 48, head, queries)]
    fill = [t[:9].transpose(0, 1).flatten(0, 1).contiguous() for t in tokens]
    at = torch.arange(9, dtype=torch.int32, device=DEVICE).repeat(3)
    for memory in (whole, apart):
        OPS.append_kv(fill[0].clone(), *fill[1:], *step.tables, at, at, *memory, 9)
    while taken + rows <= 48:
        q, k, v = (t[taken : taken + rows].transpose(0, 1).flatten(0, 1) for t in tokens)
        at = (starts[:, None] + taken + torch.arange(rows, dtype=torch.int32, device=DEVICE)).flatten()
        got = OPS.append_attention(q, k, v, *step.tables, at, at, *whole, 0.1, rows=rows)
        for j in range(rows):
            each = (t[j::rows] for t in (q, k, v))
            now = at[j::rows].contiguous()
            assert_same(got[j::rows], OPS.append_attention(*each, *step.tables, now, now, *apart, 0.1))
        taken += 1 if taken % 3 == 0 else rows
    assert_same_caches(whole, apart)


@pytest.mark.parametrize("context", [120, 20_000])
def test_graphs_of_tokens_may_be_replayed(context: int) -> None:
    """With positions that differ from those of the capture, and counters that belong to the graph."""
    step = Step(F16, "int8", 128, 4, 4, STARTS[context], context)
    memory, places, slots = step.copied(), step.places.clone(), step.places.clone()

    def run() -> Tensor:
        return OPS.append_attention(*step.tokens, *step.tables, places, slots, *memory, 0.1, rows=4)

    want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    first = torch.arange(4, dtype=torch.int32, device=DEVICE).repeat(step.batch)
    for now in (first, step.places, step.places):
        for state in (places, slots):
            state.copy_(now)
        for part, kept in zip(memory, step.memory, strict=True):
            if part is not None and kept is not None:
                part.copy_(kept)
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want) == (now is not first)
