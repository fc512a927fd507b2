"""Attention over a cache: eager arithmetic on the CPU, registration, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotated
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.numerics import int8 as numerics
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut


# ── append_kv ────────────────────────────────────────────────────────────────────────────────────


def tokens(dtype: torch.dtype = torch.float32, *, int8: bool = False, rotary: bool = True) -> dict[str, Any]:
    """Arguments of append_kv: three tokens, four queries, two heads of keys of 16, a context of 9."""
    torch.manual_seed(1)
    qkv = torch.randn(3, (4 + 2 + 2) * 16).to(dtype)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split((64, 32, 32), 1))
    cos, sin = (torch.randn(9, 16).to(dtype) for _ in range(2))
    keys, values = (torch.zeros(4, 2, 9, 16).to(torch.int8 if int8 else dtype) for _ in range(2))
    scales = [torch.zeros(4, 2, 9) if int8 else None for _ in range(2)]
    places = torch.tensor([2, 8, 0], dtype=torch.int32), torch.tensor([5, 8, 1], dtype=torch.int32)
    tables = (cos, sin) if rotary else (None, None)
    names = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values", "key_scales", "value_scales")
    return dict(zip(names, (q, k, v, *tables, *places, keys, values, *scales), strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_keys_are_rotated_and_kept(dtype: torch.dtype) -> None:
    for int8, rotary, length in product((False, True), (False, True), (1, 3)):
        given = tokens(dtype, int8=int8, rotary=rotary)
        q, k = given["q"].clone(), given["k"].clone()
        if rotary:
            cos, sin = (given[name][given["positions"].long()][:, None] for name in ("cos", "sin"))
            q, k = (t[:, :, 0] for t in apply_rotary_pos_emb(q[:, :, None], k[:, :, None], cos, sin))
        OPS.append_kv(**given, length=length)
        assert torch.equal(given["q"], q)
        for cache, scales, rows in (("keys", "key_scales", k), ("values", "value_scales", given["v"])):
            want = torch.zeros_like(given[cache])
            for i, slot in enumerate(given["slots"].tolist()):
                row = rows[i]
                if int8:
                    row, scale = numerics.quantize_per_token_ref(row, 16)
                    assert torch.equal(given[scales][i // length, :, slot], scale)
                want[i // length, :, slot] = row
            assert torch.equal(given[cache], want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 3])
def test_neighbours_are_rotated_as_gptj_does(dtype: torch.dtype, length: int) -> None:
    given = tokens(dtype)
    halves = [given[name][:, :8] for name in ("cos", "sin")]
    given["cos"], given["sin"] = (half.repeat_interleave(2, -1) for half in halves)
    cos, sin = (half[given["positions"].long()][None] for half in halves)
    q, k = (gptj_rotated(given[name][None], sin, cos)[0] for name in ("q", "k"))
    OPS.append_kv(**given, length=length, interleaved=True)
    assert torch.equal(given["q"], q)
    for i, slot in enumerate(given["slots"].tolist()):
        assert torch.equal(given["keys"][i // length, :, slot], k[i])
        assert torch.equal(given["values"][i // length, :, slot], given["v"][i])


# ── decode_attention ─────────────────────────────────────────────────────────────────────────────


def attention(dtype: torch.dtype = torch.float32, int8: bool = False) -> dict[str, Any]:
    torch.manual_seed(2)
    q = torch.randn(3, 4 * 16 + 8).to(dtype)[:, :64].unflatten(1, (4, 16))
    keys, values = torch.randn(2, 4, 2, 9, 16).to(dtype)
    scales: list[Tensor | None] = [None, None]
    if int8:
        (keys, first), (values, second) = (
            (stored.view(4, 2, 9, 16), scale.view(4, 2, 9))
            for stored, scale in (numerics.quantize_per_token_ref(t.reshape(-1, 16), 16) for t in (keys, values))
        )
        scales = [first, second]
    names = ("q", "keys", "values", "key_scales", "value_scales", "positions", "scale")
    positions = torch.tensor([0, 8, 3], dtype=torch.int32)
    return dict(zip(names, (q, keys, values, *scales, positions, 0.25), strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (1, 0.0), (99, 0.0), (0, 0.5), (4, 0.75)])
def test_attention_is_softmax_over_what_is_kept(dtype: torch.dtype, int8: bool, window: int, softcap: float) -> None:
    given = attention(dtype, int8)
    got = OPS.decode_attention(**given, window=window, softcap=softcap)
    assert got.dtype is dtype
    assert got.is_contiguous()
    for b, position in enumerate(given["positions"].tolist()):
        kept, seen = [], slice(max(0, position + 1 - window) if window else 0, position + 1)
        for name, scales in (("keys", "key_scales"), ("values", "value_scales")):
            part = given[name][b, :, seen].double()
            kept.append(part * given[scales][b, :, seen, None].double() if int8 else part)
        keys, values = kept
        q = given["q"][b].double().view(2, 2, 16)
        scores = q @ keys.transpose(1, 2) * 0.25
        want = (softcap * (scores / softcap).tanh() if softcap else scores).softmax(-1) @ values
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
        assert (got[b].double() - want.view(4, 16)).abs().max() <= tolerance * values.abs().max()


SINKS = torch.tensor([0.5, -3.0, 2.5, 9.0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (1, 0.0), (4, 0.75)])
def test_sinks_are_logits_without_values(dtype: torch.dtype, int8: bool, window: int, softcap: float) -> None:
    """A sink as a row of the softmax in float64; one of minus infinity is none."""
    given = attention(dtype, int8) | {"window": window, "softcap": softcap}
    got = OPS.decode_attention(**given, sinks=SINKS)
    assert got.dtype is dtype
    for b, position in enumerate(given["positions"].tolist()):
        kept, seen = [], slice(max(0, position + 1 - window) if window else 0, position + 1)
        for name, scales in (("keys", "key_scales"), ("values", "value_scales")):
            part = given[name][b, :, seen].double()
            kept.append(part * given[scales][b, :, seen, None].double() if int8 else part)
        keys, values = kept
        scores = given["q"][b].double().view(2, 2, 16) @ keys.transpose(1, 2) * 0.25
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        weights = torch.cat((scores, SINKS.double().view(2, 2, 1)), 2).softmax(-1)[..., :-1]
        unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}[dtype]
        error = (got[b].double() - (weights @ values).view(4, 16)).abs()
        assert error.max() <= (unit + 2.0**-18) * values.abs().max()
    none = OPS.decode_attention(**given, sinks=torch.full((4,), -torch.inf))
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(none, OPS.decode_attention(**given), atol=tolerance, rtol=tolerance)


def test_sinks_are_those_of_gpt_oss() -> None:
    given = attention()
    positions = given["positions"]
    mask = torch.where(torch.arange(9) <= positions[:, None], 0.0, -torch.inf)[:, None, None]
    module = SimpleNamespace(num_key_value_groups=2, sinks=SINKS, training=False)
    keys, values = given["keys"][:3], given["values"][:3]
    want, _ = eager_attention_forward(module, given["q"][:, :, None], keys, values, mask, 0.25)
    torch.testing.assert_close(OPS.decode_attention(**given, sinks=SINKS), want[:, 0])


@pytest.mark.parametrize("op", ["decode_attention", "append_attention"])
def test_wrong_sinks_are_refused(op: str) -> None:
    given = attention() if op == "decode_attention" else tokens() | {"scale": 0.25}
    with pytest.raises(errors.DtypeError, match=f"{op}: sinks is float16; allowed: float32"):
        getattr(OPS, op)(**given, sinks=SINKS.half())
    with pytest.raises(errors.ShapeError, match=rf"{op}: sinks has shape \[3\]; allowed: \[4\]"):
        getattr(OPS, op)(**given, sinks=SINKS[1:])


# ── append_attention ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_step_is_its_two_parts(dtype: torch.dtype, int8: bool, rotary: bool) -> None:
    apart, given = (tokens(dtype, int8=int8, rotary=rotary) for _ in range(2))
    q = given["q"].clone()
    OPS.append_kv(**apart)
    names = ("q", "keys", "values", "key_scales", "value_scales", "positions")
    want = OPS.decode_attention(*(apart[name] for name in names), 0.25)
    counters, absmax = torch.zeros(12, dtype=torch.int32), torch.zeros(len(q))
    assert torch.equal(OPS.append_attention(**given, scale=0.25, counters=counters, absmax=absmax), want)
    for overload in (OPS.append_attention, OPS.append_attention.early_read):
        sunk = overload(**tokens(dtype, int8=int8, rotary=rotary), scale=0.25, sinks=SINKS)
        assert torch.equal(sunk, OPS.decode_attention(*(apart[name] for name in names), 0.25, sinks=SINKS))
        assert not torch.equal(sunk, want)
    assert torch.equal(absmax, want.flatten(1).float().abs().amax(1))
    assert torch.equal(given["q"], q)
    for name in names[1:5]:
        assert given[name] is None or torch.equal(given[name], apart[name])
    nobody = {n: t[:0] if n in ("q", "k", "v", "positions", "slots") else t for n, t in tokens(dtype).items()}
    assert OPS.append_attention(**nobody, scale=0.25).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary", [False, True])
def test_a_step_normalizes_heads_first(dtype: torch.dtype, rotary: bool) -> None:
    apart, given = (tokens(dtype, rotary=rotary) for _ in range(2))
    norms = {name: torch.rand(16).add(0.5).to(dtype) for name in ("query_norm", "key_norm")}
    q, k = given["q"].clone(), given["k"].clone()
    for name, weight in zip(("q", "k"), norms.values(), strict=True):
        x = apart[name].float()
        scaled = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
        apart[name] = weight * scaled
    want = OPS.append_attention(**apart, scale=0.25)
    assert torch.equal(OPS.append_attention(**given, scale=0.25, **norms, eps=1e-5), want)
    assert torch.equal(given["keys"], apart["keys"])
    assert torch.equal(given["q"], q)
    assert torch.equal(given["k"], k)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key_norm": None}, errors.ConfigError, "norms of queries and of keys go together"),
        ({"key_norm": torch.ones(8)}, errors.ShapeError, r"key_norm has shape \[8\]; allowed: \[16\]"),
        ({"query_norm": torch.ones(16).half()}, errors.DtypeError, "query_norm is float16; allowed: float32"),
    ],
)
def test_wrong_norms_of_heads_are_refused(changes: dict[str, Any], error: Any, message: str) -> None:
    norms = {"query_norm": torch.ones(16), "key_norm": torch.ones(16), **changes}
    with pytest.raises(error, match=f"append_attention: {message}"):
        OPS.append_attention(**tokens(), scale=0.25, **norms)


# ── registration and refusals ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["append_kv", "append_attention"])
@pytest.mark.parametrize(("argument", "value"), [("slots", -1), ("slots", 9), ("positions", -1), ("positions", 9)])
def test_places_out_of_range_are_refused(name: str, argument: str, value: int) -> None:
    given = tokens()
    given[argument][1] = value
    before = given["keys"].clone(), given["q"].clone()
    with pytest.raises(errors.RangeError, match=rf"{argument} holds {value}; allowed: 0 to 8"):
        getattr(OPS, name)(**given, **({"scale": 1.0} if name == "append_attention" else {}))
    assert torch.equal(given["keys"], before[0])
    assert torch.equal(given["q"], before[1])


@pytest.mark.parametrize("value", [-1, 10_000])
def test_positions_out_of_range_are_refused(value: int) -> None:
    given = attention()
    given["positions"][0] = value
    with pytest.raises(errors.RangeError, match=f"decode_attention: positions holds {value}; allowed: 0 to"):
        OPS.decode_attention(**given)


def test_counters_must_be_contiguous() -> None:
    given, counters = attention(), torch.zeros(64, dtype=torch.int32)
    OPS.decode_attention(**given, counters=counters)
    with pytest.raises(errors.ShapeError, match="contiguous"):
        OPS.decode_attention(**given, counters=counters[::2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    for int8, more in ((False, ()), (True, (3,)), (True, (1, True))):
        torch.library.opcheck(OPS.append_kv.default, (*tokens(int8=int8).values(), *more))
    for int8 in (False, True):
        step = (*tokens(int8=int8).values(), 0.25)
        norms = (None, None, None, 0, 0.0, torch.ones(16), torch.ones(16), 1e-6)
        for more in ((), norms, (*norms, 0, 0, SINKS)):
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(OPS.append_attention.default, (*step, *more), test_utils=tests)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # how long the longest is, is data
    counters = torch.zeros(12, dtype=torch.int32)
    for more in ((), (counters,), (counters, 0, 0.0, 0, 0, SINKS)):
        torch.library.opcheck(OPS.decode_attention.default, (*attention().values(), *more), test_utils=tests)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(3, 4, 16, dtype=torch.int32)}, errors.DtypeError, "q is int32"),
        ({"q": torch.zeros(3, 64)}, errors.ShapeError, r"q has shape \[3, 64\]; allowed: \[tokens, heads, head\]"),
        ({"k": torch.zeros(3, 2, 8)}, errors.ShapeError, r"k has shape \[3, 2, 8\]; allowed: \[3, heads, 16\]"),
        ({"k": torch.zeros(3, 16, 2).transpose(1, 2)}, errors.ShapeError, "k has strides"),
        ({"v": torch.zeros(3, 1, 16)}, errors.ShapeError, "2 keys and 1 values a token; the cache has 2"),
        ({"keys": torch.zeros(2, 2, 9, 16)}, errors.ShapeError, r"keys have shape .*; allowed: \[3 or more"),
        ({"values": torch.zeros(4, 2, 8, 16)}, errors.ShapeError, "values has shape"),
        ({"sin": None}, errors.ConfigError, "cosines and sines go together"),
        ({"cos": torch.zeros(9, 8)}, errors.ShapeError, r"cos is \[9, 8\] of torch.float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, errors.DtypeError, "positions is int64; allowed: int32"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, errors.ShapeError, "slots has shape"),
        ({"values": torch.zeros(4, 9, 2, 16).transpose(1, 2)}, errors.ShapeError, "values have strides"),
        ({"key_scales": torch.zeros(4, 2, 9)}, errors.ConfigError, "key_scales goes with an int8 cache"),
    ],
)
def test_appending_refuses(changes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=f"append_kv: .*{message}"):
        OPS.append_kv(**{**tokens(), **changes})
    with pytest.raises(error, match=f"append_attention: .*{message}"):
        OPS.append_attention(**{**tokens(), **changes}, scale=0.25)


@pytest.mark.parametrize("length", [0, -3, 2, 4])
def test_appending_refuses_parts_of_sequences(length: int) -> None:
    with pytest.raises(errors.ShapeError, match=f"append_kv: 3 tokens, {length} of each sequence"):
        OPS.append_kv(**tokens(), length=length)


def test_prefill_needs_only_the_cache_of_its_sequence() -> None:
    changes = {name: torch.zeros(1, 2, 9, 16) for name in ("keys", "values")}
    OPS.append_kv(**{**tokens(), **changes}, length=3)
    assert changes["keys"].any()


def test_attention_refuses() -> None:
    given = attention()
    for changes, error, message in (
        ({"q": torch.zeros(3, 3, 16)}, errors.ShapeError, "3 queries of 2 heads of keys; allowed: whole multiples"),
        ({"keys": given["keys"].half()}, errors.DtypeError, "keys is float16; allowed: float32, int8"),
        ({"keys": given["keys"].transpose(1, 2)}, errors.ShapeError, "keys have shape"),
        ({"positions": given["positions"][:2]}, errors.ShapeError, "positions has shape"),
        (
            {"counters": torch.zeros(11, dtype=torch.int32)},
            errors.ShapeError,
            r"counters are \[11\] .*allowed: \[12 or",
        ),
        ({"counters": torch.zeros(12)}, errors.DtypeError, "counters is float32; allowed: int32"),
    ):
        with pytest.raises(error, match=f"decode_attention: .*{message}"):
            OPS.decode_attention(**{**given, **changes})
    given = attention(int8=True)
    with pytest.raises(errors.ShapeError, match="value_scales have strides"):
        OPS.decode_attention(**{**given, "value_scales": torch.zeros(4, 9, 2).transpose(1, 2)})


@pytest.mark.parametrize("reach", [0, 1, 9])
def test_a_reach_changes_no_result_of_the_cpu(reach: int) -> None:
    given = attention()
    assert torch.equal(OPS.decode_attention(**given, reach=reach), OPS.decode_attention(**given))
    want = OPS.append_attention(**tokens(), scale=0.25)
    assert torch.equal(OPS.append_attention(**tokens(), scale=0.25, reach=reach), want)


@pytest.mark.parametrize("reach", [-1, 10])
def test_a_reach_is_within_the_places(reach: int) -> None:
    with pytest.raises(errors.ConfigError, match=f"decode_attention: reach is {reach}; allowed: 0 to 9, the places"):
        OPS.decode_attention(**attention(), reach=reach)
    with pytest.raises(errors.ConfigError, match=f"append_attention: reach is {reach}; allowed: 0 to 9, the places"):
        OPS.append_attention(**tokens(), scale=0.25, reach=reach)
    ring = {"window": 3, "ring": 12}
    OPS.decode_attention(**attention(), **ring, reach=12)
    with pytest.raises(errors.ConfigError, match="reach is 13; allowed: 0 to 12"):
        OPS.decode_attention(**attention(), **ring, reach=13)


def test_a_step_refuses_few_counters() -> None:
    with pytest.raises(errors.ShapeError, match=r"append_attention: counters are \[11\] .*allowed: \[12 or"):
        OPS.append_attention(**tokens(), scale=0.25, counters=torch.zeros(11, dtype=torch.int32))


def test_attention_refuses_more_sequences_than_a_grid_has() -> None:
    """On tensors without memory; one sequence less is taken."""

    def calls(batch: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        q, k = (torch.empty(batch, heads, 16, device="meta") for heads in (4, 2))
        keys, values = torch.empty(2, batch, 2, 9, 16, device="meta")
        places = torch.empty(batch, dtype=torch.int32, device="meta")
        yield OPS.decode_attention, (q, keys, values, None, None, places, 0.25)
        yield OPS.append_attention, (q, k, k, None, None, places, places, keys, values, None, None, 0.25)

    for op, given in calls(65_535):
        assert op(*given).shape == (65_535, 4, 16)
    for op, given in calls(65_536):
        with pytest.raises(errors.ShapeError, match="q has 65536 sequences; allowed: at most 65535"):
            op(*given)
