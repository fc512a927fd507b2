"""A cache of 4 bits on the CPU: what is stored, what attention makes of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import ConfigError, DtypeError, QcutError, ShapeError
from qcut.numerics import int4
from qcut.numerics.int8 import quantize_per_token_ref

OPS = torch.ops.qcut
BATCH, HEADS, KV_HEADS, CONTEXT, HEAD = 2, 4, 2, 9, 64


def empty(kinds: str, batch: int = BATCH) -> list[Tensor]:
    """Keys, values and their scales."""
    rows, scales = [], []
    for kind in (kinds.partition("/")[0], kinds.partition("/")[2] or kinds):
        is_int8 = kind == "int8"
        shape = (batch, KV_HEADS, CONTEXT)
        rows.append(torch.zeros(*shape, HEAD if is_int8 else HEAD // 2, dtype=torch.int8 if is_int8 else torch.uint8))
        scales.append(torch.zeros(shape, dtype=torch.float32 if is_int8 else torch.int16))
    return [*rows, *scales]


def filled(kinds: str) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Turned queries, keys and values of a prompt, and the cache that holds them."""
    generator = torch.Generator().manual_seed(0)
    tokens = BATCH * CONTEXT
    q, k, v = (torch.randn(tokens, n, HEAD, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    cache, slots = empty(kinds), torch.arange(CONTEXT, dtype=torch.int32).repeat(BATCH)
    OPS.append_kv(q, k, v, None, None, slots, slots, *cache, CONTEXT)
    return q, k, v, cache


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of queries, keys and values ``[tokens, heads, HEAD]`` of a prompt, in float64."""
    q, k, v = (t.double().unflatten(0, (BATCH, CONTEXT)).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    hidden = torch.ones(CONTEXT, CONTEXT).triu(1).bool()
    weights = (q @ k.transpose(2, 3) * 0.1).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("kinds", ["int4", "int8/int4", "int4/int8"])
def test_attention_reads_the_rounded_keys_and_values(kinds: str) -> None:
    given = torch.randn(BATCH * CONTEXT, HEADS, HEAD, generator=torch.Generator().manual_seed(0))
    q, k, v, cache = filled(kinds)
    kept = []
    for rows, kind in ((k, kinds.partition("/")[0]), (v, kinds.partition("/")[2] or kinds)):
        flat = rows.reshape(-1, HEAD)
        if kind == "int8":
            q8, scale = quantize_per_token_ref(flat, HEAD)
            kept.append((q8.float() * scale[:, None]).view(rows.shape))
        else:
            kept.append(
                int4.rotate_back(int4.dequantize_rows_ref(*int4.quantize_rows_ref(int4.rotate(flat)))).view(k.shape)
            )
    want = attended(given, *kept)
    starts, lengths = torch.zeros(BATCH, dtype=torch.int32), torch.full((BATCH,), CONTEXT, dtype=torch.int32)
    got = OPS.prompt_attention(q, *cache, starts, lengths, 0.1, CONTEXT)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
    near = attended(given, k, v)
    assert (got.double() - near).square().mean() < 0.02 * near.square().mean()
    last = torch.arange(CONTEXT - 1, BATCH * CONTEXT, CONTEXT)
    step = OPS.decode_attention(q[last], *cache, torch.full((BATCH,), CONTEXT - 1, dtype=torch.int32), 0.1)
    torch.testing.assert_close(step, got[last], atol=2e-6, rtol=1e-5)


def guide() -> Tensor:
    """Of queries that mostly lie along a column, and of keys with a mean."""
    moments = torch.eye(HEAD) + 50 * torch.diag((torch.arange(HEAD) == 3).float())
    main = int4.rotate(int4.rotate(moments).t())
    return int4.guide_of(main.expand(KV_HEADS, HEAD, HEAD), torch.linspace(-1, 1, KV_HEADS * HEAD).view(KV_HEADS, HEAD))


def test_keys_are_rounded_by_their_heads_guides() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(BATCH, n, HEAD, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    slots = torch.tensor([4, 7], dtype=torch.int32)
    nearest, guided, stepped = (empty("int4") for _ in range(3))
    OPS.append_kv(q.clone(), k, v, None, None, slots, slots, *nearest)
    OPS.append_kv(q.clone(), k, v, None, None, slots, slots, *guided, 1, False, guide())
    for stored, rows, by in ((guided[0], k, guide()), (guided[1], v, None)):
        for b, slot in enumerate(slots.tolist()):
            codes, _ = int4.quantize_rows_ref(int4.rotate(rows[b]), by)
            assert torch.equal(stored[b, :, slot], codes)
    assert not torch.equal(nearest[0], guided[0])
    assert torch.equal(nearest[1], guided[1])
    y = OPS.append_attention(q, k, v, None, None, slots, slots, *stepped, 0.1, None, None, guide())
    assert all(map(torch.equal, stepped, guided))
    turned = int4.rotate(q)
    assert torch.equal(y, OPS.decode_attention(turned, *guided, slots, 0.1))


def test_guides_pass_opcheck() -> None:
    q, k, v = (torch.randn(BATCH, n, HEAD) for n in (HEADS, KV_HEADS, KV_HEADS))
    slots = torch.tensor([4, 7], dtype=torch.int32)
    step = (q, k, v, None, None, slots, slots, *empty("int4"))
    torch.library.opcheck(OPS.append_kv.default, (*step, 1, False, guide()))
    torch.library.opcheck(OPS.append_attention.default, (*step, 0.1, None, None, guide()))


@pytest.mark.parametrize("kinds", ["int4", "int8/int4"])
def test_a_step_is_its_two_operators(kinds: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(BATCH, n, HEAD, generator=generator).half() for n in (HEADS, KV_HEADS, KV_HEADS))
    slots = torch.tensor([4, 7], dtype=torch.int32)
    *_, one = filled(kinds)
    other = [t.clone() for t in one]
    untouched = q.clone()
    got = OPS.append_attention(q, k, v, None, None, slots, slots, *one, 0.1)
    assert torch.equal(q, untouched)
    OPS.append_kv(q, k, v, None, None, slots, slots, *other)
    assert torch.equal(q, untouched) == (kinds != "int4")  # queries are rotated only with keys
    assert torch.equal(got, OPS.decode_attention(q, *other, slots, 0.1))
    assert all(map(torch.equal, one, other))


REFUSED: dict[str, tuple[dict[str, Any], type[QcutError], str]] = {
    "head": ({"head": 48}, ConfigError, "heads of 48 columns; allowed: 32, 64, 128, 256"),
    "columns": ({"keys": torch.zeros(2, 2, 9, 64, dtype=torch.uint8)}, ShapeError, "keys have shape .*context, 32"),
    "values": ({"values": torch.zeros(2, 2, 9, 64)}, DtypeError, "values is float32"),
    "words": ({"key_scales": torch.zeros(2, 2, 9)}, DtypeError, "key_scales is float32; allowed: int16"),
    "guide": ({"guide": torch.zeros(2, 64, 4, dtype=torch.int32)}, ShapeError, "guide has shape .*2, 66, 4"),
    "guide type": ({"guide": torch.zeros(2, 66, 4)}, DtypeError, "guide is float32; allowed: int32"),
    "guide strides": (
        {"guide": torch.zeros(2, 4, 66, dtype=torch.int32).transpose(1, 2)},
        ShapeError,
        "guide has strides",
    ),
    "none": ({"value_scales": None}, ConfigError, "value_scales goes with an int8 cache or a 4-bit one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_appending_refuses(name: str) -> None:
    changes, error, message = REFUSED[name]
    head = changes.pop("head", HEAD)
    rows = [torch.zeros(BATCH, n, head) for n in (HEADS, KV_HEADS, KV_HEADS)]
    slots = torch.zeros(BATCH, dtype=torch.int32)
    cache = dict(zip(("keys", "values", "key_scales", "value_scales"), empty("int4"), strict=True))
    given = [*rows, None, None, slots, slots]
    with pytest.raises(error, match=f"({message})"):
        OPS.append_kv(*given, **(cache | changes))


def test_other_keys_have_no_guides() -> None:
    rows, slots = [torch.zeros(BATCH, n, HEAD) for n in (HEADS, KV_HEADS, KV_HEADS)], torch.zeros(2, dtype=torch.int32)
    step = (*rows, None, None, slots, slots, *empty("int8/int4"))
    for op, rest in ((OPS.append_kv, (1, False)), (OPS.append_attention, (0.1, None, None))):
        with pytest.raises(ConfigError, match="guide goes with 4-bit keys, and only with these"):
            op(*step, *rest, guide())
