"""Norms of heads in a step's kernel: bitwise a norm's own kernel, then the step's without norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.engine.kv_cache.cache import KV_DTYPES, KVCache, KVDtype
from qcut.numerics import int4
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

OPS = torch.ops.qcut
KV_HEADS, CONTEXT, EPS = 2, 700, 1e-6
OPTIONS: tuple[tuple[dict[str, Any], bool], ...] = (
    *(({}, rotary) for rotary in (True, False)),
    ({"window": 33}, True),
    ({"window": 1, "softcap": 2.0}, True),
)
"""Of scores, and whether queries and keys are turned."""
LENGTHS = (1, 16, 17, 64, 333, 700)
"""Tokens of each sequence, its new one the last."""
HEADS = ((128, 4), (80, 3), (128, 1), (64, 12), (256, 2))
"""Columns, and queries for each head of keys; the first two are those of all types."""


def filled(dtype: torch.dtype, head: int, kv_cache: KVDtype) -> tuple[Tensor, ...]:
    """A cache in which every place holds something."""
    sizes = 1, len(LENGTHS), KV_HEADS, CONTEXT, head
    cache = KVCache(*sizes, dtype=dtype, device=torch.device(DEVICE), kv_dtype=kv_cache)
    rows = [torch.randn(len(LENGTHS) * CONTEXT, KV_HEADS, head).to(DEVICE, dtype) for _ in range(3)]
    slots = torch.arange(CONTEXT, dtype=torch.int32, device=DEVICE).repeat(len(LENGTHS))
    OPS.append_kv(*rows, None, None, slots, slots, *cache.layer(0), CONTEXT)
    return cache.layer(0)


def step(dtype: torch.dtype, head: int, queries: int) -> dict[str, Any]:
    """Queries, keys and values of rows that lie in one projection, from nothing to the type's largest numbers."""
    heads = (KV_HEADS * queries, KV_HEADS, KV_HEADS)
    rows = torch.randn(len(LENGTHS), sum(heads) * head)
    rows[0], rows[1, ::7], rows[2] = 0, 3000, rows[2] * 2.0**-13
    rows[3, : 2 * head] = 2.0**-24
    q, k, v = (t.unflatten(1, (-1, head)) for t in rows.to(DEVICE, dtype).split([n * head for n in heads], 1))
    positions = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE) - 1
    cos, sin = torch.randn(2, CONTEXT, head).to(DEVICE, dtype)
    return {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": positions, "slots": positions.clone()}


def cases() -> Iterator[tuple[torch.dtype, int, int, KVDtype]]:
    """Types and heads, and the caches that there are of them."""
    heads = {torch.float16: HEADS, torch.bfloat16: HEADS[:2], torch.float32: HEADS[:2]}
    for dtype, (head, queries) in ((dtype, shape) for dtype, shapes in heads.items() for shape in shapes):
        nibbles = dtype is not torch.float32 and head in int4.HEADS
        for kv_cache in KV_DTYPES if nibbles else KV_DTYPES[:2]:
            yield dtype, head, queries, kv_cache


@pytest.mark.parametrize(("dtype", "head", "queries", "kv_cache"), [*cases()])
def test_one_launch_is_the_norms_and_the_step(dtype: torch.dtype, head: int, queries: int, kv_cache: KVDtype) -> None:
    torch.manual_seed(head)
    given, before = step(dtype, head, queries), filled(dtype, head, kv_cache)
    norms = [torch.rand(head).add(0.5).to(DEVICE, dtype) for _ in range(2)]
    names = ("keys", "values", "key_scales", "value_scales")
    for options, rotary in OPTIONS:
        call = given if rotary else {**given, "cos": None, "sin": None}
        apart = dict(call)
        for name, weight in zip(("q", "k"), norms, strict=True):
            rows = call[name].reshape(-1, head)
            apart[name] = OPS.add_norm(rows, None, weight, None, False, EPS)[1].view(call[name].shape)
        results = []
        for each, more in ((apart, {}), (call, {"query_norm": norms[0], "key_norm": norms[1], "eps": EPS})):
            cache = [None if t is None else t.clone() for t in before]
            absmax = torch.zeros(len(LENGTHS), device=DEVICE)
            y = OPS.append_attention(
                **each, **dict(zip(names, cache, strict=True)), scale=head**-0.5, absmax=absmax, **options, **more
            )
            results.append((y, absmax, *cache))
        for want, got in zip(*results, strict=True):
            assert want is got is None or torch.equal(want.view(-1), got.view(-1))
        assert not results[0][0].isnan().any()


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize(("head", "queries"), HEADS)
def test_a_step_is_near_the_cpu(head: int, queries: int, kv_cache: KVDtype) -> None:
    torch.manual_seed(head)
    given, before = step(torch.float16, head, queries), filled(torch.float16, head, kv_cache)
    norms = [torch.rand(head).add(0.5).to(DEVICE, torch.float16) for _ in range(2)]

    def answer(device: str) -> Tensor:
        call = [t.to(device) for t in given.values()]
        cache = [None if t is None else t.to(device, copy=True) for t in before]
        y: Tensor = OPS.append_attention(
            *call, *cache, head**-0.5, None, None, None, 0, 0.0, *(t.to(device) for t in norms), EPS
        )
        return y

    assert sqnr_db(answer("cpu").double(), answer(DEVICE).cpu().double()) > 35


def test_a_row_of_any_alignment() -> None:
    """Rows and weights that start at no multiple of 16 bytes."""
    torch.manual_seed(0)
    given, cache = step(torch.float16, 128, 4), filled(torch.float16, 128, "auto")
    options = (None, None, None, 0, 0.0, *(torch.rand(129).to(DEVICE, torch.float16)[1:] for _ in range(2)), EPS)
    heads, places = [*given.values()][:3], [*given.values()][3:]
    wide = [torch.cat((t.flatten(1), t.new_zeros(len(t), 3)), 1)[:, :-3].unflatten(1, (-1, 128)) for t in heads]
    results = []
    for rows in (heads, wide):
        kept = [None if t is None else t.clone() for t in cache]
        results.append(OPS.append_attention(*rows, *places, *kept, 0.1, *options))
    assert_same(*results)
