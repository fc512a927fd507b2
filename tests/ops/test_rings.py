"""Attention over a cache that is a ring: the CPU's results over a cache with a row for every place, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.engine.kv_cache.cache import KV_DTYPES, KVCache, KVDtype
from qcut.engine.kv_cache.ring_cache import Ring

OPS = torch.ops.qcut
PLACES, ROWS, WINDOW, HEAD, SEQUENCES = 50, 16, 9, 32, 3
"""A sequence may have 50 tokens; a ring holds 16 of them."""


def caches(dtype: torch.dtype, kind: KVDtype) -> tuple[KVCache, KVCache]:
    sizes = {"dtype": dtype, "device": torch.device("cpu"), "kv_dtype": kind}
    whole, rung = (
        KVCache(1, SEQUENCES, 2, PLACES + 1, HEAD, rings=rings, **sizes)  # type: ignore[arg-type]
        for rings in ((), (Ring(WINDOW, ROWS),))
    )
    return whole, rung


def rows(dtype: torch.dtype, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, n, HEAD, generator=generator).to(dtype) for n in (4, 2, 2)]


def tables(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [*torch.randn(2, PLACES, HEAD, generator=generator).to(dtype)]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("sinks", [None, (1.0, -2.0, 5.0, 0.0)])
def test_chunks_and_steps_are_those_without(
    dtype: torch.dtype, kind: KVDtype, softcap: float, sinks: tuple[float, ...] | None
) -> None:
    """Chunks of 8, as many as a ring of 16 has room for next to a window of 9, padded; then steps, past a full end."""
    whole, rung = caches(dtype, kind)
    logits = None if sinks is None else torch.tensor(sinks)
    starts = [0, 0, 0]
    for turn, counts in enumerate(((8, 3, 0), (8, 8, 5), (1, 8, 8), (8, 0, 7), (8, 8, 8))):
        q, k, v = rows(dtype, 8 * SEQUENCES, turn)
        places = torch.tensor(starts)[:, None] + torch.arange(8)
        real = torch.arange(8) < torch.tensor(counts)[:, None]
        slots = torch.where(real, places, PLACES).flatten().int()
        positions = places.clamp(max=PLACES - 1).flatten().int()
        results = []
        for cache, ring in ((whole, 0), (rung, PLACES)):
            mine = q.clone()
            OPS.append_kv(mine, k, v, *tables(dtype), positions, slots, *cache.layer(0), 8, False, None, ring)
            chunk = (int32(*starts), int32(*counts), 0.2, 8, None, WINDOW, softcap, ring, logits)
            results.append(OPS.prompt_attention(mine, *cache.layer(0), *chunk))
        assert torch.equal(*results)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert starts == [33, 27, 28]
    for step in range(20):
        q, k, v = rows(dtype, SEQUENCES, 100 + step)
        slots = int32(*(min(start + step, PLACES) for start in starts))
        positions = slots.clamp(max=PLACES - 1)
        results = []
        for cache, ring in ((whole, 0), (rung, PLACES)):
            given = (q, k, v, *tables(dtype), positions, slots, *cache.layer(0), 0.2, None, None, None, WINDOW, softcap)
            results.append(OPS.append_attention(*given, ring=ring, sinks=logits))
        assert torch.equal(*results) if step < 17 else torch.equal(*(y[1:] for y in results))


def test_tokens_go_to_their_rows_padding_nowhere() -> None:
    _, rung = caches(torch.float32, "auto")
    q, k, v = rows(torch.float32, SEQUENCES, 0)
    slots = int32(PLACES - 1, ROWS, PLACES)
    OPS.append_kv(q, k, v, None, None, slots, slots, *rung.layer(0), 1, False, None, PLACES)
    keys = rung.layer(0)[0]
    assert torch.equal(keys[0, :, (PLACES - 1) % ROWS], k[0])
    assert torch.equal(keys[1, :, 0], k[1])
    assert keys.any(-1).sum() == 2 * 2


def test_rows_outside_the_window_are_not_read() -> None:
    """Rows outside of the window may hold anything finite."""
    _, rung = caches(torch.float32, "auto")
    memory = rung.layer(0)
    for part in memory[:2]:
        part.copy_(torch.randn(part.shape))
    q, position = rows(torch.float32, SEQUENCES, 1)[0], 37
    positions = torch.full((SEQUENCES,), position, dtype=torch.int32)
    want = OPS.decode_attention(q, *memory, positions, 0.2, None, WINDOW, 0.0, PLACES)
    for place in range(position + 1, position - WINDOW + 1 + ROWS):
        for part in memory[:2]:
            part[:, :, place % ROWS] = 1e6
    assert torch.equal(OPS.decode_attention(q, *memory, positions, 0.2, None, WINDOW, 0.0, PLACES), want)


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"),
    [
        ("append_kv", {"ring": -1}, errors.ConfigError, "ring is -1; allowed: 1 and more places, or 0"),
        ("append_kv", {"length": 18}, errors.ShapeError, "a ring of 16 rows, 18 tokens; allowed: 18 or more"),
        ("append_kv", {"slots": int32(*[51] * 18)}, errors.RangeError, "slots holds 51; allowed: 0 to 50"),
        ("decode_attention", {"window": 0}, errors.ConfigError, "a ring of 16 rows goes with a window"),
        ("decode_attention", {"window": 17}, errors.ShapeError, "1 tokens and a window of 17; allowed: 17 or more"),
        (
            "decode_attention",
            {"positions": int32(*[50] * 3)},
            errors.RangeError,
            "positions holds 50; allowed: 0 to 49",
        ),
        ("append_attention", {"window": 0}, errors.ConfigError, "a ring of 16 rows goes with a window"),
        ("append_attention", {"positions": int32(*[50] * 3)}, errors.RangeError, "positions holds 50; allowed: 0 to"),
        ("prompt_attention", {"window": 12}, errors.ShapeError, "6 tokens and a window of 12; allowed: 17 or more"),
        ("prompt_attention", {"starts": int32(45, 45, 45)}, errors.RangeError, "6 tokens after 45; allowed: 50 in all"),
    ],
)
def test_refusals(op: str, changes: dict[str, Any], error: Any, message: str) -> None:
    count = 3 if op in ("decode_attention", "append_attention") else 18
    q, k, v = rows(torch.float32, count, 0)
    memory = dict(
        zip(("keys", "values", "key_scales", "value_scales"), caches(torch.float32, "auto")[1].layer(0), strict=True)
    )
    places = torch.zeros(count, dtype=torch.int32)
    tokens = {"q": q, "k": k, "v": v, "cos": None, "sin": None, "positions": places, "slots": places}
    given: dict[str, Any] = {
        "append_kv": {**tokens, "length": 6},
        "decode_attention": {"q": q, "positions": places, "scale": 1.0, "window": WINDOW},
        "append_attention": {**tokens, "scale": 1.0, "window": WINDOW},
        "prompt_attention": {
            "q": q,
            "starts": int32(0, 0, 0),
            "lengths": int32(6, 6, 6),
            "scale": 1.0,
            "length": 6,
            "window": WINDOW,
        },
    }[op]
    with pytest.raises(error, match=f"{op}: .*{message}"):
        getattr(OPS, op)(**{**given, **memory, "ring": PLACES, **changes})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    q, k, v = rows(torch.float32, SEQUENCES, 0)
    places, memory = int32(3, 30, 49), caches(torch.float32, "auto")[1].layer(0)
    tests = ("test_schema", "test_faketensor")
    for op, given in (
        (OPS.append_kv, (q, k, v, None, None, places, places, *memory, 1, False, None, PLACES)),
        (OPS.decode_attention, (q, *memory, places, 0.2, None, WINDOW, 0.0, PLACES)),
        (OPS.prompt_attention, (q, *memory, places, int32(1, 1, 1), 0.2, 1, None, WINDOW, 0.0, PLACES)),
        (
            OPS.append_attention,
            (q, k, v, None, None, places, places, *memory, 0.2, *[None] * 3, WINDOW, 0.0, None, None, 0.0, PLACES),
        ),
    ):
        torch.library.opcheck(op.default, given, test_utils=tests)
