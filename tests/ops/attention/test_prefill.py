"""Attention of chunks of prompts: a float64 softmax, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.backends.cuda.prompt_attention import _in_torch
from qcut.numerics import int8 as numerics
from qcut.ops.attention.prefill import PromptAttentionOp
from tests.support.oracles import FLOATS

OP = torch.ops.qcut.prompt_attention
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def chunks(dtype: torch.dtype = torch.float32, int8: bool = False, seed: int = 3) -> dict[str, Any]:
    """Five rows for each of three sequences, four queries, two heads of keys of 16, a context of 13."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(15, 4 * 16 + 8, generator=generator).to(dtype)[:, :64].unflatten(1, (4, 16))
    cache = torch.randn(2, 4, 2, 13, 16, generator=generator).to(dtype)
    lengths = torch.randint(0, 6, (3,), generator=generator, dtype=torch.int32)
    starts = torch.tensor([int(torch.randint(0, 14 - n, (), generator=generator)) for n in lengths.tolist()]).int()
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    if int8:
        q8, scale = numerics.quantize_per_token_ref(cache.reshape(-1, 16), 16)
        cache, scales = q8.view(cache.shape), scale.view(cache.shape[:-1]).unbind()
    names = ("q", "keys", "values", "key_scales", "value_scales", "starts", "lengths", "scale", "length")
    return dict(zip(names, (q, *cache, *scales, starts, lengths, 0.25, 5), strict=True))


def wanted(given: dict[str, Any]) -> torch.Tensor:
    """The definition in float64, row by row."""
    q, length = given["q"].double(), given["length"]
    want, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // given["keys"].shape[1]
    kept = []
    for name, scales in (("keys", "key_scales"), ("values", "value_scales")):
        part = given[name].double()
        kept.append(part if given[scales] is None else part * given[scales][..., None].double())
    keys, values = kept
    for b, (start, tokens) in enumerate(zip(given["starts"].tolist(), given["lengths"].tolist(), strict=True)):
        for i in range(tokens):
            for h in range(q.shape[1]):
                end, window, softcap = start + i + 1, given.get("window", 0), given.get("softcap", 0.0)
                k, v = (t[b, h // group, max(0, end - window) if window else 0 : end] for t in (keys, values))
                scores = k @ q[b * length + i, h] * given["scale"]
                scores = softcap * (scores / softcap).tanh() if softcap else scores
                if given.get("sinks") is not None:
                    scores = torch.cat((scores, given["sinks"][h : h + 1].double()))
                want[b * length + i, h] = scores.softmax(0)[: len(v)] @ v
    return want


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
def test_is_causal_softmax_over_what_came_before(dtype: torch.dtype, int8: bool) -> None:
    for seed in range(4):
        given, absmax = chunks(dtype, int8, seed), torch.full((15,), 0.1)
        got = OP(**given, absmax=absmax)
        assert got.dtype is dtype
        assert got.is_contiguous()
        assert (got.double() - wanted(given)).abs().max() <= 4 * TOLERANCE[dtype]
        assert torch.equal(absmax, got.flatten(1).float().abs().amax(1).clamp(min=0.1))
        rows, real = torch.arange(15), given["lengths"].repeat_interleave(5)
        assert not got[rows % 5 >= real].any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (4, 0.0), (99, 0.0), (0, 0.5), (3, 0.75)])
def test_windows_and_softcaps(dtype: torch.dtype, int8: bool, window: int, softcap: float) -> None:
    """On the CPU and in torch's form for CUDA."""
    for seed in range(3):
        given = chunks(dtype, int8, seed) | {"window": window, "softcap": softcap}
        want = wanted(given)
        for got in (OP(**given), _in_torch(PromptAttentionOp(**given))):
            assert (got.double() - want).abs().max() <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (4, 0.0), (3, 0.75)])
def test_sinks_take_a_share_of_weights(dtype: torch.dtype, int8: bool, window: int, softcap: float) -> None:
    """On the CPU and in torch's form for CUDA; rows past a chunk stay zero."""
    for seed in range(3):
        given = chunks(dtype, int8, seed) | {"window": window, "softcap": softcap}
        given["sinks"] = torch.tensor([0.5, -3.0, 2.5, 9.0])
        want = wanted(given)
        for got in (OP(**given), _in_torch(PromptAttentionOp(**given))):
            assert (got.double() - want).abs().max() <= 2 * TOLERANCE[dtype]
            assert not got[torch.arange(15) % 5 >= given["lengths"].repeat_interleave(5)].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": -1}, "window is -1; allowed: 1 and more, or 0"),
        ({"softcap": -2.0}, "softcap is -2.0; allowed: above 0, or 0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"softcap": float("inf")}, "softcap is inf"),
    ],
)
def test_wrong_windows_and_softcaps_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"prompt_attention: {message}"):
        OP(**chunks(), **changes)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
def test_what_lies_past_a_chunk_does_not_matter(dtype: torch.dtype, int8: bool) -> None:
    """Neither on the CPU nor in torch's form for CUDA."""
    given = chunks(dtype, int8)
    want = OP(**given)
    near = _in_torch(PromptAttentionOp(**given))
    assert (near - want).abs().max() <= 4 * TOLERANCE[dtype]
    for b, end in enumerate((given["starts"] + given["lengths"]).tolist()):
        for name in ("key_scales", "value_scales") if int8 else ("keys", "values"):
            given[name][b, :, end:] = float("nan")
    assert torch.equal(OP(**given), want)
    assert torch.equal(_in_torch(PromptAttentionOp(**given)), near)


def test_torchs_form_takes_the_nearest_starts_and_lengths() -> None:
    given = chunks()
    outside = {"starts": torch.tensor([-2, 99, 12]).int(), "lengths": torch.tensor([9, 3, 4]).int()}
    nearest = {"starts": torch.tensor([0, 13, 12]).int(), "lengths": torch.tensor([5, 0, 1]).int()}
    got, want = (_in_torch(PromptAttentionOp(**{**given, **changes})) for changes in (outside, nearest))
    assert torch.equal(got, want)
    assert (want - OP(**{**given, **nearest})).abs().max() <= 4e-5


def test_nobody_attends() -> None:
    given = chunks()
    nobody = {name: given[name][:0] for name in ("q", "starts", "lengths")}
    assert OP(**{**given, **nobody}).shape == (0, 4, 16)
    given["lengths"].zero_()
    assert not OP(**given).any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # starts and lengths are data
    for int8, absmax in ((False, None), (True, torch.zeros(15))):
        torch.library.opcheck(OP.default, (*chunks(int8=int8).values(), absmax), test_utils=tests)
        more = (absmax, 0, 0.0, 0, torch.zeros(4))
        torch.library.opcheck(OP.default, (*chunks(int8=int8).values(), *more), test_utils=tests)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(15, 4, 16, dtype=torch.int32)}, errors.DtypeError, "q is int32"),
        ({"q": torch.zeros(15, 16, 4).transpose(1, 2)}, errors.ShapeError, "q has strides"),
        ({"q": torch.zeros(15, 3, 16)}, errors.ShapeError, "3 queries of 2 heads of keys"),
        ({"length": 4}, errors.ShapeError, "15 tokens, 4 of each sequence; allowed: whole sequences"),
        ({"length": 0}, errors.ShapeError, "15 tokens, 0 of each sequence"),
        ({"length": 3}, errors.ShapeError, r"keys have shape .*; allowed: \[5 or more"),
        ({"keys": torch.zeros(4, 2, 13, 16).half()}, errors.DtypeError, "keys is float16; allowed: float32, int8"),
        ({"key_scales": torch.zeros(4, 2, 13)}, errors.ConfigError, "key_scales goes with an int8 cache"),
        ({"starts": torch.zeros(3)}, errors.DtypeError, "starts is float32; allowed: int32"),
        ({"lengths": torch.zeros(4).int()}, errors.ShapeError, r"lengths has shape \[4\]; allowed: \[3\]"),
        ({"starts": torch.tensor([0, -1, 0]).int()}, errors.RangeError, "starts holds -1; allowed: 0 to 13"),
        ({"lengths": torch.tensor([6, 0, 0]).int()}, errors.RangeError, "lengths holds 6; allowed: 0 to 5"),
        (
            {"starts": torch.tensor([0, 9, 0]).int(), "lengths": torch.tensor([0, 5, 0]).int()},
            errors.RangeError,
            "sequence 1 has 5 tokens after 9; allowed: 13 in all",
        ),
        ({"sinks": torch.zeros(2)}, errors.ShapeError, r"sinks has shape \[2\]; allowed: \[4\]"),
        ({"sinks": torch.zeros(4).double()}, errors.DtypeError, "sinks is float64; allowed: float32"),
        ({"absmax": torch.zeros(3)}, errors.ShapeError, r"absmax has shape \[3\]; allowed: \[15\]"),
    ],
)
def test_refuses(changes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=f"prompt_attention: .*{message}"):
        OP(**{**chunks(), **changes})
