"""The operators between a decoder's projections: eager arithmetic on the CPU, registration, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotated
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.numerics import int8 as numerics

OPS = torch.ops.qcut
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


# ── add_norm ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("residual", [False, True])
def test_norms_are_the_modules(dtype: torch.dtype, residual: bool) -> None:
    x, other = torch.randn(2, 5, 48).to(dtype)
    weight, bias = torch.randn(2, 48).to(dtype)
    s = x + other if residual else x
    rms = LlamaRMSNorm(48, 1e-5)
    rms.weight.data = weight
    for layer, b, want in (
        (False, None, rms(s)),
        (True, bias, F.layer_norm(s, (48,), weight, bias, 1e-5)),
        (True, None, F.layer_norm(s, (48,), weight, None, 1e-5)),
    ):
        total, y = OPS.add_norm(x, other if residual else None, weight, b, layer, 1e-5)
        assert torch.equal(y, want)
        assert torch.equal(total, s) if residual else total.shape == (0,)


@pytest.mark.parametrize("layer", [False, True])
def test_int8_norms_are_the_norms_quantized(layer: bool) -> None:
    x, residual = torch.randn(2, 5, 40).half()
    weight, bias = torch.randn(2, 40).half()
    given = (x, residual, weight, bias if layer else None, layer, 1e-5)
    total, y = OPS.add_norm(*given)
    for got, want in zip(OPS.add_norm_int8(*given, 48), (total, *OPS.quantize_per_token(y, 48)), strict=True):
        assert torch.equal(got, want)


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
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("length", [1, 3])
def test_keys_are_rotated_and_kept(dtype: torch.dtype, int8: bool, rotary: bool, length: int) -> None:
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
def test_attention_is_softmax_over_what_is_kept(dtype: torch.dtype, int8: bool) -> None:
    given = attention(dtype, int8)
    got = OPS.decode_attention(**given)
    assert got.dtype is dtype
    assert got.is_contiguous()
    for b, position in enumerate(given["positions"].tolist()):
        kept = []
        for name, scales in (("keys", "key_scales"), ("values", "value_scales")):
            part = given[name][b, :, : position + 1].double()
            kept.append(part * given[scales][b, :, : position + 1, None].double() if int8 else part)
        keys, values = kept
        q = given["q"][b].double().view(2, 2, 16)
        want = (q @ keys.transpose(1, 2) * 0.25).softmax(-1) @ values
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
        assert (got[b].double() - want.view(4, 16)).abs().max() <= tolerance * values.abs().max()


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
    assert torch.equal(absmax, want.flatten(1).float().abs().amax(1))
    assert torch.equal(given["q"], q)
    for name in names[1:5]:
        assert given[name] is None or torch.equal(given[name], apart[name])
    nobody = {n: t[:0] if n in ("q", "k", "v", "positions", "slots") else t for n, t in tokens(dtype).items()}
    assert OPS.append_attention(**nobody, scale=0.25).shape == (0, 4, 16)


# ── activations ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_are_transformers(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 24).to(dtype)
    assert torch.equal(OPS.silu_mul(gate, up), ACT2FN["silu"](gate) * up)
    assert torch.equal(OPS.gelu_tanh(gate), ACT2FN["gelu_new"](gate))


# ── argmax ───────────────────────────────────────────────────────────────────────────────────────


def test_argmax_is_samplings() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, math.nan], [-math.inf] * 4, [math.nan] * 4, [-1.0, -0.0, 0.0, -2.0]])
    for dtype in FLOATS:
        assert OPS.argmax(logits.to(dtype)).tolist() == [1, 0, 0, 1]
    assert OPS.argmax(torch.zeros(0, 5)).shape == (0,)


def test_a_step_ends_at_the_likeliest_and_the_next_place() -> None:
    logits = torch.eye(4)[:, :3]
    tokens, positions, slots = torch.zeros(4, dtype=torch.int64), *torch.tensor([[0, 7, 8, 8], [0, 7, 8, 9]]).int()
    OPS.advance(logits, tokens, positions, slots, 9)
    assert (tokens.tolist(), positions.tolist(), slots.tolist()) == ([0, 1, 2, 0], [1, 8, 8, 8], [1, 8, 9, 9])
    torch.library.opcheck(OPS.advance.default, (logits, tokens, positions, slots, 9))


def test_advance_refuses() -> None:
    logits, tokens, places = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(errors.DtypeError, match="advance: tokens is int32"):
        OPS.advance(logits, places, places, places.clone(), 4)
    with pytest.raises(errors.ShapeError, match=r"advance: slots has shape \[1\]"):
        OPS.advance(logits, tokens, places, places[:1], 4)
    with pytest.raises(errors.ShapeError, match="allowed: contiguous"):
        OPS.advance(logits, torch.zeros(4, dtype=torch.int64)[::2], places, places.clone(), 4)
    with pytest.raises(errors.ConfigError, match="context is 0"):
        OPS.advance(logits, tokens, places, places.clone(), 0)


# ── registration and refusals ────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.library.opcheck(OPS.add_norm.default, (x, x + 1, weight, weight, True, 1e-5))
    torch.library.opcheck(OPS.add_norm.default, (x, None, weight, None, False, 1e-5))
    torch.library.opcheck(OPS.add_norm_int8.default, (x, x + 1, weight, weight, True, 1e-5, 16))
    for int8 in (False, True):
        for more in ((), (3,), (1, True)):
            torch.library.opcheck(OPS.append_kv.default, (*tokens(int8=int8).values(), *more))
        step = (*tokens(int8=int8).values(), 0.25)
        torch.library.opcheck(OPS.append_attention.default, step, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(OPS.argmax.default, (x,))
    torch.library.opcheck(OPS.gelu_tanh.default, (x,))
    torch.library.opcheck(OPS.silu_mul.default, (x, x + 1))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # how long the longest is, is data
    torch.library.opcheck(OPS.decode_attention.default, tuple(attention().values()), test_utils=tests)
    counters = torch.zeros(12, dtype=torch.int32)
    torch.library.opcheck(OPS.decode_attention.default, (*attention().values(), counters), test_utils=tests)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_results_are_contiguous_whatever_is_given() -> None:
    weight, plain = torch.randn(8), torch.randn(3, 8)
    x = torch.randn(8, 3).t()
    for first, second in ((x, x), (x, plain), (plain, x)):
        torch.library.opcheck(OPS.add_norm.default, (first, second, weight, None, True, 1e-5))
        torch.library.opcheck(OPS.add_norm.default, (first, None, weight, None, False, 1e-5))
        torch.library.opcheck(OPS.silu_mul.default, (first, second))
    torch.library.opcheck(OPS.gelu_tanh.default, (x,))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, 8)}, errors.ShapeError, r"x has shape \[2, 3, 8\]; allowed: \[M, K\]"),
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, errors.DtypeError, "x is int32"),
        ({"residual": torch.zeros(3, 8)}, errors.ShapeError, "residual has shape"),
        ({"weight": torch.zeros(8).half()}, errors.DtypeError, "weight is float16; allowed: float32"),
        ({"bias": torch.zeros(8)}, errors.ConfigError, "an RMS norm has no bias"),
    ],
)
def test_norms_refuse(changes: dict[str, Any], error: Any, message: str) -> None:
    given = {"x": torch.zeros(2, 8), "residual": None, "weight": torch.zeros(8), "bias": None}
    with pytest.raises(error, match=f"add_norm: .*{message}"):
        OPS.add_norm(**{**given, "layer": False, "eps": 1e-5, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(3, 4, 16, dtype=torch.int32)}, errors.DtypeError, "q is int32"),
        ({"k": torch.zeros(3, 2, 8)}, errors.ShapeError, r"k has shape \[3, 2, 8\]; allowed: \[3, heads, 16\]"),
        ({"k": torch.zeros(3, 16, 2).transpose(1, 2)}, errors.ShapeError, "k has strides"),
        ({"v": torch.zeros(3, 1, 16)}, errors.ShapeError, "2 keys and 1 values a token; the cache has 2"),
        ({"keys": torch.zeros(2, 2, 9, 16)}, errors.ShapeError, r"keys have shape .*; allowed: \[3 or more"),
        ({"values": torch.zeros(4, 2, 8, 16)}, errors.ShapeError, "values has shape"),
        ({"sin": None}, errors.ConfigError, "cosines and sines go together"),
        ({"cos": torch.zeros(9, 8)}, errors.ShapeError, r"cos is \[9, 8\] of torch.float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, errors.DtypeError, "positions is int64; allowed: int32"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, errors.ShapeError, "slots has shape"),
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


def test_a_prompt_needs_a_cache_of_its_sequence_alone() -> None:
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


def test_a_step_refuses_few_counters() -> None:
    with pytest.raises(errors.ShapeError, match=r"append_attention: counters are \[11\] .*allowed: \[12 or"):
        OPS.append_attention(**tokens(), scale=0.25, counters=torch.zeros(11, dtype=torch.int32))


def test_argmax_refuses() -> None:
    with pytest.raises(errors.ShapeError, match=r"argmax: logits have shape \[4\]"):
        OPS.argmax(torch.zeros(4))
    with pytest.raises(errors.DtypeError, match="argmax: logits is int64"):
        OPS.argmax(torch.zeros(2, 4, dtype=torch.int64))


def test_activations_refuse() -> None:
    with pytest.raises(errors.ShapeError, match=r"gelu_tanh: x has shape \[4\]; allowed: \[M, N\]"):
        OPS.gelu_tanh(torch.zeros(4))
    with pytest.raises(errors.ShapeError, match=r"silu_mul: up has shape \[2, 3\]"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(errors.DtypeError, match="silu_mul: up is float16"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 4).half())


@pytest.mark.parametrize("k_padded", [4, 20])
def test_int8_norms_refuse(k_padded: int) -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(errors.ShapeError, match=f"k_padded is {k_padded}; allowed: a multiple of 16 from 8 on"):
        OPS.add_norm_int8(x, None, weight, None, False, 1e-5, k_padded)
    with pytest.raises(errors.ShapeError, match=r"^qcut::add_norm_int8: weight has shape \[7\]"):
        OPS.add_norm_int8(x, None, weight[1:], None, False, 1e-5, 16)
