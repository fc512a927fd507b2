"""Attention of chunks of prompts on CUDA, against the definition in float64 with a derived bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.backends.cuda import prompt_attention as prompt_attention_cuda
from qcut.backends.cuda.launch.plans import forget_plans, watched_loads
from qcut.dispatch.attention import PromptKernel
from qcut.dispatch.gpus import Target
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.core.source import DType
from qcut.numerics import int8 as numerics
from tests.gpu.support.oracles import DEVICE, assert_same

OP = torch.ops.qcut.prompt_attention
F16, BF16, F32, S8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
ROUNDING = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24}
NAMES = ("q", "keys", "values", "key_scales", "value_scales", "starts", "lengths", "scale", "length")


def problem(
    dtype: torch.dtype,
    cache: torch.dtype,
    head: int,
    kv_heads: int,
    group: int,
    chunks: list[tuple[int, int]],
    length: int,
    context: int,
    spread: float = 1.0,
) -> dict[str, Any]:
    """Chunks ``(start, tokens)`` of random sequences; the cache has a sequence more, and nothing but NaN past a chunk.

    ``spread`` divides and multiplies the values of neighbouring tokens.
    """
    generator = torch.Generator(DEVICE).manual_seed(head + length)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    heads, batch = group * kv_heads, len(chunks)
    q = random(batch * length, heads * head + 8)[:, : heads * head].unflatten(1, (heads, head))
    stored = random(2, batch + 1, kv_heads, context, head)
    stored[1, :, :, ::2] *= spread
    stored[1, :, :, 1::2] /= spread
    scales: tuple[Tensor | None, ...] = (None, None)
    if cache is S8:
        q8, scale = numerics.quantize_per_token_ref(stored.reshape(-1, head), head)
        stored, scales = q8.view(stored.shape), scale.view(stored.shape[:-1]).unbind()
    for b, (start, tokens) in enumerate(chunks):
        for t in scales if cache is S8 else stored:
            assert t is not None
            t[b, :, start + tokens :] = float("nan")
    starts, lengths = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in zip(*chunks, strict=True))
    given = (q, *stored, *scales, starts, lengths, head**-0.5, length)
    return dict(zip(NAMES, given, strict=True))


def check(given: dict[str, Any], got: Tensor, *, rounds_cache: bool = False) -> float:
    """Raise unless y is near the definition; the error's largest share of what is allowed.

    Weights are off by their rounding to q's type, by that of scores, whose float32 sums lose at most 2**-22 of the
    magnitudes for each product, and by 2**-18 for exponentials, logarithms and scales. float16 weights, at most 1, are
    off by 2**-25 where they are subnormal. Sinks, of at most 9, are off by 2**-18 in the sum. Softcaps are off by
    2**-20 of themselves. Sums of n products lose 2**-22 n of their magnitudes. Results are rounded, and
    ``rounds_cache`` says that keys and values are, too.
    """
    q, length, scale = given["q"], given["length"], given["scale"]
    heads, head, kv_heads = q.shape[1], q.shape[2], given["keys"].shape[1]
    unit = ROUNDING[q.dtype]
    worst = 0.0
    assert got.shape == q.shape
    assert got.is_contiguous()
    for b, (start, tokens) in enumerate(zip(given["starts"].tolist(), given["lengths"].tolist(), strict=True)):
        y, end = got[b * length : (b + 1) * length].double(), start + tokens
        assert not y[tokens:].any()
        if tokens == 0:
            continue
        kept = []
        for name, scales in (("keys", "key_scales"), ("values", "value_scales")):
            rows = given[name][b, :, :end].double()
            kept.append(rows if given[scales] is None else rows * given[scales][b, :, :end, None].double())
        keys, values = (t.repeat_interleave(heads // kv_heads, 0) for t in kept)
        rows = q[b * length : b * length + tokens].double().transpose(0, 1)
        own, window, softcap = (
            torch.arange(start, end, device=DEVICE)[:, None],
            given.get("window", 0),
            given.get("softcap", 0.0),
        )
        places = torch.arange(end, device=DEVICE)
        seen = (places <= own) & (places > own - window) if window else places <= own
        scores = rows @ keys.transpose(1, 2) * scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        scores = scores.masked_fill(~seen, float("-inf"))
        if (sinks := given.get("sinks")) is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, tokens, 1)), 2)
        weights = scores.softmax(-1)[..., :end]
        magnitudes = (rows.abs() @ keys.abs().transpose(1, 2) * scale * seen).amax(-1, keepdim=True)
        want, mean = weights @ values, weights @ values.abs()
        relative = unit + 2 * head * 2.0**-22 * magnitudes + 2.0**-18 + end * 2.0**-22 + 2 * 2.0**-20 * softcap
        relative += unit * (2 * magnitudes + 1) * rounds_cache
        allowed = mean * relative + unit * want.abs() + 2.0**-24 + end * 2.0**-25 * values.abs().amax()
        error = (y[:tokens].transpose(0, 1) - want).abs()
        share = (error / allowed).nan_to_num(nan=float("inf")).max().item()
        assert share <= 1, f"sequence {b} of {given['starts'].tolist()}, {given['lengths'].tolist()}: {share:.3g}"
        worst = max(worst, share)
    return worst


@pytest.fixture(params=["chosen", "mma"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels that dispatch chooses, and those of every architecture."""

    def select(x: DType, cache: DType, head: int, target: Target, **shape: Any) -> PromptKernel | None:
        legal = PromptMma.is_legal(x, cache, head, target.arch)
        return PromptMma.for_shape(x, cache, head, target.arch, scores=shape["scores"]) if legal else None

    if request.param == "mma":
        monkeypatch.setattr(prompt_attention_cuda, "select_prompt_attention", select)
    forget_plans()
    yield request.param
    forget_plans()


CHUNKS = (
    ([(0, 1)], 1),
    ([(0, 300)], 300),
    ([(17, 33), (0, 0), (128, 77), (511, 1)], 77),
    ([(1000, 200), (3, 199)], 256),
    ([(9, 600)], 600),
)
HEADS = (
    *((head, F16, F16) for head in (64, 80, 96, 128, 256, 40, 72, 160, 192)),
    *((head, BF16, BF16) for head in (64, 128, 256)),
    *((head, dtype, S8) for head in (64, 80, 128, 256) for dtype in (F16, BF16)),
    *((head, F32, F32) for head in (64, 96)),
    (40, F16, S8),
)


@pytest.mark.parametrize(("head", "dtype", "cache"), HEADS)
def test_is_the_softmax_of_what_came_before(head: int, dtype: torch.dtype, cache: torch.dtype, form: str) -> None:
    for (chunks, length), (kv_heads, group) in zip(CHUNKS, ((2, 4), (3, 1), (1, 7), (2, 8), (8, 4)), strict=True):
        given = problem(dtype, cache, head, kv_heads, group, chunks, length, 1280)
        absmax = torch.full((len(given["q"]),), 0.01, device=DEVICE)
        with watched_loads() as loaded:
            got = OP(**given, absmax=absmax)
        kernel = "prompt_mma" if form == "mma" else "prompt_"
        assert all(kernel in name for name in loaded)
        check(given, got, rounds_cache=cache is S8 and not loaded)
        assert torch.equal(absmax, got.flatten(1).float().abs().amax(1).clamp(min=0.01))
        assert_same(OP(**given), got)


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (50, 0.0), (333, 0.0), (0, 2.0), (129, 0.75)])
@pytest.mark.parametrize(
    ("head", "dtype", "cache"),
    [(64, F16, F16), (128, BF16, BF16), (256, F16, F16), (128, F16, S8), (256, BF16, S8), (64, F32, F32)],
)
@pytest.mark.parametrize("sunk", [False, True])
def test_windows_softcaps_and_sinks(
    head: int, dtype: torch.dtype, cache: torch.dtype, window: int, softcap: float, sunk: bool, form: str
) -> None:
    for (chunks, length), (kv_heads, group) in zip(CHUNKS, ((2, 4), (3, 1), (1, 7), (2, 8), (8, 4)), strict=True):
        given = problem(dtype, cache, head, kv_heads, group, chunks, length, 1280)
        given |= {"window": window, "softcap": softcap}
        if sunk:
            given["sinks"] = torch.linspace(-4, 9, kv_heads * group, device=DEVICE)
        with watched_loads() as loaded:
            got = OP(**given)
        check(given, got, rounds_cache=cache is S8 and not loaded)
        assert_same(OP(**given), got)


@pytest.mark.parametrize(("head", "dtype", "cache"), [(64, BF16, BF16), (128, F16, S8), (64, F32, F32)])
def test_sinks_far_below_and_above_all_scores(head: int, dtype: torch.dtype, cache: torch.dtype, form: str) -> None:
    """In tiles of many rows, in clusters, and where a chunk has no tokens."""
    for chunks, length in (([(17, 33), (0, 0), (511, 1)], 77), ([(1300, 3), (0, 2)], 4), ([(0, 600)], 600)):
        given = problem(dtype, cache, head, 2, 4, chunks, length, 1400)
        plain = OP(**given)
        low = OP(**given, sinks=torch.full((8,), float("-inf"), device=DEVICE))
        if dtype is F32:
            assert (low - plain).abs().max() <= 1e-5
        else:
            assert_same(low, plain)
        sinks = torch.tensor([300.0, 0.0] * 4, device=DEVICE)
        got = OP(**given, sinks=sinks)
        assert not got[:, ::2].any()
        assert_same(got[:, 1::2], OP(**given, sinks=torch.zeros_like(sinks))[:, 1::2])


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_scales_of_values_may_differ_much(dtype: torch.dtype, form: str) -> None:
    check(given := problem(dtype, S8, 128, 2, 4, [(5, 290)], 290, 300, spread=60.0), OP(**given))


@pytest.mark.parametrize("length", [1, 63, 65, 127, 129, 1000, 2049])
def test_every_length_from_the_start(length: int, form: str) -> None:
    for chunks in ([(0, length)], [(2100 - length, length), (0, length // 2)]):
        check(given := problem(F16, F16, 128, 4, 4, chunks, length, 2100), OP(**given))


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "cache"), [(F16, F16), (BF16, S8)])
@pytest.mark.parametrize("sunk", [False, True])
def test_few_queries_see_a_long_cache(head: int, dtype: torch.dtype, cache: torch.dtype, sunk: bool, form: str) -> None:
    """Places that clusters share, and too few to share."""
    for chunks, length in (
        ([(2000, 3)], 4),
        ([(100, 16)], 16),
        ([(1300, 30), (0, 2), (257, 20)], 31),
        ([(2047, 1)], 1),
    ):
        given = problem(dtype, cache, head, 2, 4, chunks, length, 2048)
        if sunk:
            given["sinks"] = torch.linspace(-4, 9, 8, device=DEVICE)
        absmax = torch.full((len(given["q"]),), 0.01, device=DEVICE)
        with watched_loads() as loaded:
            got = OP(**given, absmax=absmax)
        if form == "chosen" and torch.cuda.get_device_capability() == (9, 0):
            assert all("_c" in name for name in loaded)
        check(given, got)
        assert torch.equal(absmax, got.flatten(1).float().abs().amax(1).clamp(min=0.01))
        assert_same(OP(**given), got)


def test_a_prompt_in_chunks_is_the_prompt() -> None:
    whole = problem(F16, F16, 128, 2, 4, [(0, 1024)], 1024, 1024)
    want = OP(**whole)
    for start in (0, 512):
        part = whole | {"q": whole["q"][start : start + 512], "length": 512}
        part["starts"], part["lengths"] = whole["starts"] + start, whole["lengths"] * 0 + 512
        check(part, got := OP(**part))
        assert (got - want[start : start + 512]).abs().max() <= 2e-3


@pytest.mark.parametrize("cache", [F16, S8])
def test_graphs_are_replayed_with_other_lengths(cache: torch.dtype, form: str) -> None:
    given = problem(F16, cache, 128, 2, 4, [(0, 300), (700, 300)], 300, 1000)
    for name in ("values",) if cache is F16 else ("value_scales", "key_scales"):
        given[name].nan_to_num_(0.0)
    given["keys"].nan_to_num_(0.0)
    OP(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OP(**given)
    for starts, lengths in (([0, 0], [300, 0]), ([5, 700], [1, 299]), ([690, 0], [300, 128])):
        given["starts"].copy_(torch.tensor(starts))
        given["lengths"].copy_(torch.tensor(lengths))
        y.fill_(float("nan"))
        graph.replay()
        check(given, y)
        assert_same(OP(**given), y)


def test_lengths_out_of_range_are_the_nearest() -> None:
    given = problem(F16, F16, 64, 2, 2, [(0, 40), (60, 40)], 40, 100)
    for starts, lengths, nearest in (
        ([-3, 90], [99, 99], ([0, 90], [40, 10])),
        ([200, 0], [5, -1], ([100, 0], [0, 0])),
    ):
        given["keys"].nan_to_num_(0.0), given["values"].nan_to_num_(0.0)
        given["starts"], given["lengths"] = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in nearest)
        want = OP(**given)
        given["starts"], given["lengths"] = (
            torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (starts, lengths)
        )
        assert_same(OP(**given), want)
