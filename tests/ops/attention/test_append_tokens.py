"""`append_attention` of several tokens of each sequence on the CPU: the operators one by one, and plain softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.engine.kv_cache.cache import KV_DTYPES, KVCache, KVDtype
from qcut.engine.kv_cache.ring_cache import Ring
from qcut.numerics.codebook import tokens as rotated
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut
HEAD, CONTEXT, STARTS = 32, 20, (0, 9, 14)
NAMES = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values", "key_scales", "value_scales")


def step(dtype: torch.dtype, rows: int, kind: KVDtype = "auto", ring: Ring | None = None) -> dict[str, Any]:
    """Arguments of some tokens of three sequences; their caches hold tokens before these."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cache = KVCache(1, 3, 2, CONTEXT + 1, HEAD, dtype=dtype, device=torch.device("cpu"), kv_dtype=kind, rings=[ring])
    tables, start = (random(CONTEXT, HEAD), random(CONTEXT, HEAD)), torch.tensor(STARTS)[:, None]
    for first in range(0, CONTEXT, 4):  # as many as a ring takes at once
        before = torch.arange(first, first + 4).expand(3, -1)
        slots = torch.where(before < start, before, CONTEXT).flatten().int()
        filled = (random(12, heads, HEAD) for heads in (4, 2, 2))
        OPS.append_kv(*filled, None, None, slots, slots, *cache.layer(0), 4, ring=CONTEXT if ring else 0)
    places = (start + torch.arange(rows)).flatten().int()
    tokens = (random(3 * rows, 4, HEAD), random(3 * rows, 2, HEAD), random(3 * rows, 2, HEAD))
    return dict(zip(NAMES, (*tokens, *tables, places, places.clone(), *cache.layer(0)), strict=True))


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 0.5}, {"sinks": torch.tensor([0.5, -3, 2, 9])}])
def test_tokens_are_appended_then_attended(
    dtype: torch.dtype, kind: KVDtype, rows: int, options: dict[str, Any]
) -> None:
    given = step(dtype, rows, kind)
    apart, untouched, absmax = copied(given), given["q"].clone(), torch.zeros(3 * rows)
    OPS.append_kv(**apart, length=rows)
    want = torch.empty_like(given["q"])
    for j in range(rows):
        read = (apart["q"][j::rows], *(apart[name] for name in NAMES[7:]), apart["positions"][j::rows], 0.25)
        want[j::rows] = OPS.decode_attention(*read, **options)
    got = OPS.append_attention(**given, scale=0.25, absmax=absmax, rows=rows, **options)
    assert torch.equal(got, want)
    assert torch.equal(absmax, want.flatten(1).float().abs().amax(1))
    assert torch.equal(given["q"], untouched)
    for name in NAMES[7:]:
        assert given[name] is None or torch.equal(given[name], apart[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "group", "seeds"), [(1, 32, [3]), (2, 64, [3, 4]), (3, 128, [5])])
def test_results_are_rotated(dtype: torch.dtype, rows: int, group: int, seeds: list[int]) -> None:
    given = step(dtype, rows)
    plain = OPS.append_attention(**copied(given), scale=0.25, rows=rows)
    signs = rotated.operands("hadamard", group, 4 * HEAD, seeds, dtype)
    want, _ = OPS.rotate_tokens(plain.flatten(1), signs, "hadamard", group, seeds, dtype)
    turn = {"operands": signs, "group_size": group, "seeds": seeds}
    got = OPS.append_attention(**given, scale=0.25, rows=rows, **turn)
    assert torch.equal(got, want)
    absmax = torch.zeros(3 * rows)
    for changed in ({"group_size": 48}, {"seeds": []}, {"operands": signs[:, :1]}, {"absmax": absmax}):
        with pytest.raises(errors.QcutError, match="append_attention"):
            OPS.append_attention(**given, scale=0.25, rows=rows, **turn | changed)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("window", "softcap", "sunk"), [(0, 0.0, False), (4, 0.0, True), (9, 0.75, False)])
def test_tokens_are_softmax_up_to_themselves(dtype: torch.dtype, window: int, softcap: float, sunk: bool) -> None:
    """Over keys and values that are put together in float64, without positions."""
    rows, sinks = 4, torch.tensor([0.5, -3.0, 2.5, 9.0])
    given = step(dtype, rows) | {"cos": None, "sin": None}
    old = [given[name].double() for name in ("keys", "values")]
    got = OPS.append_attention(
        **given, scale=0.25, window=window, softcap=softcap, sinks=sinks if sunk else None, rows=rows
    )
    for b, start in enumerate(STARTS):
        tokens = slice(b * rows, b * rows + rows)
        keys, values = (
            torch.cat((cache[b, :, :start], given[name][tokens].double().transpose(0, 1)), 1)
            for cache, name in zip(old, ("k", "v"), strict=True)
        )
        for j in range(rows):
            seen = slice(max(0, start + j + 1 - window) if window else 0, start + j + 1)
            q = given["q"][b * rows + j].double().view(2, 2, HEAD)
            scores = q @ keys[:, seen].transpose(1, 2) * 0.25
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            if sunk:
                scores = torch.cat((scores, sinks.double().view(2, 2, 1)), 2)
            weights = scores.softmax(-1)[..., : seen.stop - seen.start]
            want = (weights @ values[:, seen]).view(4, HEAD)
            tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
            assert (got[b * rows + j].double() - want).abs().max() <= tolerance * values.abs().max()


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_tokens_of_rings_are_those_without(kind: KVDtype) -> None:
    """A ring of 8 rows, with a window of 5 and 4 tokens: new rows go around its end."""
    whole, rung = (step(torch.float32, 4, kind, ring) for ring in (None, Ring(5, 8)))
    want = OPS.append_attention(**whole, scale=0.25, window=5, rows=4)
    assert torch.equal(OPS.append_attention(**rung, scale=0.25, window=5, ring=CONTEXT, rows=4), want)


def test_head_norms_are_of_every_token() -> None:
    given, norms = step(torch.float32, 2), {name: torch.rand(HEAD) + 0.5 for name in ("query_norm", "key_norm")}
    apart = copied(given)
    for name, weight in zip(("q", "k"), norms.values(), strict=True):
        x = apart[name]
        apart[name] = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))
    want = OPS.append_attention(**apart, scale=0.25, rows=2)
    assert torch.equal(OPS.append_attention(**given, scale=0.25, **norms, eps=1e-5, rows=2), want)


@pytest.mark.parametrize("rows", [-1, 0, 4])
def test_only_whole_sequences_are_taken(rows: int) -> None:
    message = f"append_attention: 6 tokens, {rows} of each sequence; allowed: whole sequences"
    with pytest.raises(errors.ShapeError, match=message):
        OPS.append_attention(**step(torch.float32, 2), scale=1.0, rows=rows)


def test_new_tokens_must_fit_a_ring() -> None:
    given = step(torch.float32, 4, "auto", Ring(5, 8))
    with pytest.raises(errors.ShapeError, match=r"a ring of 8 rows, 4 tokens and a window of 6; allowed: 9 or more"):
        OPS.append_attention(**given, scale=1.0, window=6, ring=CONTEXT, rows=4)


def test_counters_are_for_every_token() -> None:
    given = step(torch.float32, 2)
    with pytest.raises(errors.ShapeError, match=r"counters are \[23\] .*allowed: \[24 or"):
        OPS.append_attention(**given, scale=1.0, counters=torch.zeros(23, dtype=torch.int32), rows=2)


def test_a_grid_bounds_sequences_and_not_tokens() -> None:
    """On tensors without memory."""
    for sequences, taken in ((65_535, True), (65_536, False)):
        q, k = (torch.empty(2 * sequences, heads, 16, device="meta") for heads in (4, 2))
        keys, values = torch.empty(2, sequences, 2, 9, 16, device="meta")
        places = torch.empty(2 * sequences, dtype=torch.int32, device="meta")
        given = (q, k, k, None, None, places, places, keys, values, None, None, 0.25)
        if taken:
            assert OPS.append_attention(*given, rows=2).shape == q.shape
            continue
        with pytest.raises(errors.ShapeError, match="q has 65536 sequences; allowed: at most 65535"):
            OPS.append_attention(*given, rows=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    for kind in ("auto", "int8"):
        given = (*step(torch.float32, 2, kind).values(), 0.25)  # type: ignore[arg-type]
        more = (None, None, None, 0, 0.0, None, None, 0.0, 0, 0, None, 2)
        torch.library.opcheck(
            OPS.append_attention.default, (*given, *more), test_utils=("test_schema", "test_faketensor")
        )
