"""A cache of 4 bits on CUDA: rows and words bitwise the CPU's, attention within a bound, the same every time."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import DtypeError
from qcut.numerics import int4
from qcut.numerics.int8 import quantize_per_token_ref
from qcut.ops.attention.cache import Cache, dequantized
from tests.gpu.support.oracles import DEVICE, MANTISSA_BITS, assert_same

HALF, BF16 = torch.float16, torch.bfloat16
OPS = torch.ops.qcut


class Shape(NamedTuple):
    """Of one problem: types of queries, keys and values, and sizes."""

    dtype: torch.dtype
    kinds: str
    head: int
    batch: int
    kv_heads: int
    group: int
    context: int


SHAPES = (
    Shape(HALF, "int4", 128, 8, 2, 4, 700),  # parts in a cluster
    Shape(HALF, "int4", 128, 1, 8, 4, 4096),  # parts in a workspace
    Shape(BF16, "int4", 64, 3, 2, 3, 501),
    Shape(HALF, "int8/int4", 64, 2, 3, 1, 301),
    Shape(BF16, "int8/int4", 128, 2, 2, 8, 300),
    Shape(BF16, "int4", 256, 2, 2, 2, 333),
    Shape(HALF, "int4", 32, 2, 2, 5, 200),
    Shape(HALF, "int4", 64, 256, 2, 2, 100),  # one part
)


def random_cache(shape: Shape, generator: torch.Generator) -> Cache:
    """Any codes, words of ordinary scales."""
    sizes = (shape.batch, shape.kv_heads, shape.context)
    rows, scales = [], []
    for kind in (shape.kinds.partition("/")[0], shape.kinds.partition("/")[2] or shape.kinds):
        if kind == "int8":
            rows.append(torch.randint(-127, 128, (*sizes, shape.head), generator=generator).to(torch.int8))
            scales.append(torch.rand(sizes, generator=generator) * 0.02 + 0.005)
        else:
            rows.append(torch.randint(0, 256, (*sizes, shape.head // 2), generator=generator).to(torch.uint8))
            steps = (torch.rand(sizes, generator=generator) * 0.3 + 0.1).half().view(torch.int16).int() << 1 & 0xFFE0
            scales.append((steps | torch.randint(0, 32, sizes, generator=generator)).to(torch.int16))
    return Cache(rows[0], rows[1], scales[0], scales[1])


def on_gpu(given: Any) -> list[Any]:
    return [t.to(DEVICE, copy=True) if isinstance(t, Tensor) else t for t in given]


def new_rows(shape: Shape, tokens: int, generator: torch.Generator) -> list[Tensor]:
    """Queries, keys and values of tokens, with outliers."""
    heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
    rows = [torch.randn(tokens, n, shape.head, generator=generator) for n in heads]
    for part in rows[1:]:
        part[:, :, 1] *= 20
        part[0, 0] = 0
    return [part.to(shape.dtype) for part in rows]


def tables_of(shape: Shape, interleaved: bool = False) -> list[Tensor]:
    angles = torch.rand(shape.context, shape.head // 2, generator=torch.Generator().manual_seed(1)) * 6.28
    both = angles.repeat_interleave(2, 1) if interleaved else torch.cat((angles, angles), 1)
    return [both.cos().to(shape.dtype), both.sin().to(shape.dtype)]


def random_guide(shape: Shape) -> Tensor | None:
    """Of queries that lie mostly along a few directions, and of keys with a mean; None where keys are int8."""
    if shape.kinds != "int4":
        return None
    generator = torch.Generator().manual_seed(shape.context)
    weights = 2.0 ** torch.arange(6, -shape.head + 6, -1).clamp(min=-3)
    main = torch.linalg.qr(torch.randn(shape.kv_heads, shape.head, shape.head, generator=generator)).Q
    moments = main @ (weights[:, None] ** 2 * main.transpose(1, 2))
    return int4.guide_of(moments, torch.randn(shape.kv_heads, shape.head, generator=generator))


@pytest.mark.parametrize("shape", SHAPES[:7])
@pytest.mark.parametrize("rotary", ["none", "half", "interleaved"])
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("guided", [False, True])
def test_appended_rows_are_bitwise_the_cpus(shape: Shape, rotary: str, length: int, guided: bool) -> None:
    generator = torch.Generator().manual_seed(shape.head)
    tokens = shape.batch * length
    rows, cache = new_rows(shape, tokens, generator), random_cache(shape, generator)
    rows[1][-1, 0, 3] = float("nan")
    tables = [None, None] if rotary == "none" else tables_of(shape, rotary == "interleaved")
    places = torch.stack([torch.randperm(shape.context, generator=generator)[:length] for _ in range(shape.batch)])
    given = [*rows, *tables, *[places.flatten().int()] * 2, *cache]
    guide = random_guide(shape) if guided else None
    device, (guide_there,) = on_gpu(given), on_gpu([guide])
    nearest = [t.clone() for t in cache if t is not None]
    OPS.append_kv(*given[:7], *nearest, length, rotary == "interleaved")
    given[0] = rows[0] = device[0].cpu()
    OPS.append_kv(*device, length, rotary == "interleaved", guide_there)
    OPS.append_kv(*given, length, rotary == "interleaved", guide)
    for got, want in zip((device[0], *device[7:]), (given[0], *given[7:]), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(nearest[0], cache.keys) == (guide is None)
    assert torch.equal(nearest[1], cache.values)


def test_guides_of_many_tokens_are_those_of_single_ones() -> None:
    shape = SHAPES[0]._replace(batch=1)
    generator = torch.Generator().manual_seed(2)
    rows, cache, guide = new_rows(shape, 300, generator), random_cache(shape, generator), random_guide(shape)
    slots = torch.arange(300, dtype=torch.int32)
    many, single = on_gpu([*rows, *tables_of(shape), slots, slots, *cache, guide]), on_gpu([*cache, guide])
    tables, places = many[3:5], many[5]
    tokens = [t.clone() for t in many[:3]]
    OPS.append_kv(*many[:11], 300, False, many[11])
    for t in range(300):
        one = [part[t : t + 1].clone() for part in tokens]
        OPS.append_kv(*one, *tables, places[t : t + 1], places[t : t + 1], *single[:4], 1, False, single[4])
    for got, want in zip(many[7:11], single[:4], strict=True):
        assert torch.equal(got, want)


def test_rows_that_start_anywhere_are_bitwise_the_cpus() -> None:
    shape = SHAPES[2]
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape.batch, n * shape.head + 3, generator=generator).to(shape.dtype) for n in (6, 2, 2)]
    cache, slots = random_cache(shape, generator), torch.arange(shape.batch, dtype=torch.int32)
    device, on_device = on_gpu(wide), on_gpu(cache)

    def rows(given: list[Tensor]) -> list[Tensor]:
        return [t[:, 1 : 1 + n * shape.head].unflatten(1, (n, -1)) for t, n in zip(given, (6, 2, 2), strict=True)]

    OPS.append_kv(*rows(device), None, None, slots.to(DEVICE), slots.to(DEVICE), *on_device)
    OPS.append_kv(*rows(wide), None, None, slots, slots, *cache)
    for got, want in zip((device[0], *on_device), (wide[0], *cache), strict=True):
        assert torch.equal(got.cpu(), want)


def bound(q: Tensor, cache: Cache, places: Tensor, scale: float, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What attention of ``[B, heads, head]`` is in float64, and how far a kernel may be.

    A score's terms are as large as what fragments hold and zero points take away: 15 and 10 steps of a 4-bit key, and
    128 more of each where queries are bfloat16 (``MaskedNibbles``). A score errs by ``head * 2**-23`` of them, an
    exponential by ``2**-20``, and weights are rounded to q's type: shares of weights, and thus of the values as they
    are turned back, since zero points take rounded weights. A sum of T terms, as large, errs by ``T * 2**-23`` in each
    turned column; turning back adds up the columns' errors over the root of their number. Below ``2**-14`` of the
    largest, weights are rounded by half a step. Prompts hold codes less zero points in fragments: smaller terms.
    """
    (batch, heads, head), half = q.shape, 2.0 ** -(MANTISSA_BITS[q.dtype] + 1)
    group, held = heads // cache.keys.shape[1], 25 if q.dtype is HALF else 281
    k, v = (
        dequantized(rows, scales, batch, rows.shape[2], torch.float64).repeat_interleave(group, 1)
        for rows, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    )
    seen = (torch.arange(k.shape[2]) <= places[:, None])[:, None]
    mine = q.double()[:, :, None]
    scores = ((mine @ k.transpose(2, 3))[:, :, 0] * scale).masked_fill(~seen, -torch.inf)
    if sinks is not None:  # of a magnitude of at most 9: their terms err by less than exponentials
        scores = torch.cat((scores, sinks.double()[:, None].expand(batch, heads, 1)), 2)
    weights = scores.softmax(-1)[:, :, None, : k.shape[2]]
    terms = (held * steps_of(cache.key_scales, group))[..., None].expand_as(k) if cache.has_rotated_keys else k.abs()
    sizes = (mine.abs() @ terms.transpose(2, 3))[:, :, 0].masked_fill(~seen, 0.0).amax(-1) * scale
    share = (1.25 * head + 8) * 2.0**-23 * sizes + 2.0**-19 + 2 * half
    back = int4.rotate_back(v).double() if cache.has_rotated_values else v
    slack = 2 * share[..., None] * (weights @ back.abs())[:, :, 0]
    largest = v.abs().amax(-1, keepdim=True)
    if cache.has_rotated_values:
        largest = held * steps_of(cache.value_scales, group)[..., None]
    sums = 1.25 * (k.shape[2] + 64) * 2.0**-23 * 2 * (weights @ largest)[:, :, 0]
    sums = sums + 2.0**-24 * v.abs().amax(-1).sum(-1, keepdim=True)
    if cache.has_rotated_values:
        sums = sums * head**0.5
    y = (weights @ back)[:, :, 0]
    return y, slack + sums + half * 2 * y.abs() + 2.0**-24


def steps_of(words: Tensor | None, group: int) -> Tensor:
    """Scales of rows, float64, for every query."""
    assert words is not None
    codes = torch.tensor([0x10], dtype=torch.uint8).expand(*words.shape, 1)
    return int4.dequantize_rows_ref(codes, words).double().diff(dim=-1)[..., 0].repeat_interleave(group, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("sunk", [False, True])
def test_a_step_is_within_the_bound_and_the_same_every_time(shape: Shape, guided: bool, sunk: bool) -> None:
    generator = torch.Generator().manual_seed(shape.context)
    rows, cache = new_rows(shape, shape.batch, generator), random_cache(shape, generator)
    places = torch.randint(shape.context // 2, shape.context, (shape.batch,), generator=generator).int()
    scale, tables = shape.head**-0.5, tables_of(shape)
    given = [*rows, *tables, places, places, *cache]
    device = on_gpu(given)
    absmax = torch.zeros(shape.batch, device=DEVICE)
    sinks = torch.linspace(-4, 9, shape.kv_heads * shape.group) if sunk else None
    guide, there = on_gpu([random_guide(shape) if guided else None, sinks])
    got = OPS.append_attention(*device, scale, None, absmax, guide, sinks=there)
    assert_same(absmax, got.float().abs().amax((1, 2)))
    again = on_gpu(given)
    assert_same(OPS.append_attention(*again, scale, None, None, guide, sinks=there), got)
    # Bitwise the two operators; their rows are the CPU's.
    apart = on_gpu(given)
    OPS.append_kv(*apart, 1, False, guide)
    for one, other in zip(device[7:], apart[7:], strict=True):
        assert torch.equal(one, other)
    read = OPS.decode_attention(apart[0], *apart[7:], apart[5], scale, sinks=there)
    assert_same(read, got)
    want, within = bound(apart[0].cpu(), Cache(*(t.cpu() for t in apart[7:])), places, scale, sinks)
    error = (got.cpu().double() - want).abs()
    assert (error <= within).all(), float((error / within).max())


@pytest.mark.parametrize("shape", SHAPES[:7])
@pytest.mark.parametrize("length", [32, 150])
@pytest.mark.parametrize("sunk", [False, True])
def test_prompts_are_within_the_bound_and_the_same_every_time(shape: Shape, length: int, sunk: bool) -> None:
    shape = shape._replace(batch=min(shape.batch, 2), context=max(shape.context % 1000, length + 1) | 1)
    generator = torch.Generator().manual_seed(length)
    cache, scale = random_cache(shape, generator), shape.head**-0.5
    count = shape.batch * length
    q = torch.randn(count, shape.kv_heads * shape.group, shape.head, generator=generator).to(shape.dtype)
    starts = torch.randint(0, shape.context - length + 1, (shape.batch,), generator=generator).int()
    lengths = torch.full((shape.batch,), length, dtype=torch.int32)
    lengths[-1] -= 7
    sinks = torch.linspace(-4, 9, shape.kv_heads * shape.group) if sunk else None
    *given, there = on_gpu((q, *cache, starts, lengths, scale, length, sinks))
    absmax = torch.zeros(count, device=DEVICE)
    got = OPS.prompt_attention(*given, absmax, sinks=there)
    assert_same(OPS.prompt_attention(*given, sinks=there), got)
    assert_same(absmax, got.float().abs().amax((1, 2)))
    for b in range(shape.batch):
        real = int(lengths[b])
        mine = Cache(*(t[b : b + 1].expand(real, *t.shape[1:]) for t in cache))  # type: ignore[union-attr]
        rows = q[b * length : b * length + real]
        want, within = bound(rows, mine, int(starts[b]) + torch.arange(real), scale, sinks)
        error = (got[b * length : b * length + real].cpu().double() - want).abs()
        assert (error <= within).all(), float((error / within).max())
        assert not got[b * length + real : (b + 1) * length].any()


def test_graphs_replay_the_same_bits() -> None:
    shape = SHAPES[1]
    generator = torch.Generator().manual_seed(3)
    rows, cache = new_rows(shape, 1, generator), random_cache(shape, generator)
    places = torch.tensor([3000], dtype=torch.int32)
    device = on_gpu([*rows, *tables_of(shape), places, places, *cache])
    want = OPS.append_attention(*device, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = OPS.append_attention(*device, 0.1)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert_same(got, want)


def test_float32_queries_are_refused() -> None:
    shape = SHAPES[2]._replace(dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    rows, cache = new_rows(shape, shape.batch, generator), random_cache(shape, generator)
    places = torch.zeros(shape.batch, dtype=torch.int32)
    with pytest.raises(DtypeError, match="q is float32; allowed with a 4-bit cache on a GPU: float16, bfloat16"):
        OPS.append_attention(*on_gpu([*rows, None, None, places, places, *cache]), 0.1)
    with pytest.raises(DtypeError, match="q is float32; allowed with a 4-bit cache on a GPU: float16, bfloat16"):
        OPS.decode_attention(*on_gpu((rows[0], *cache, places)), 0.1)


def test_int8_rows_beside_4_bit_ones_are_as_they_are_alone() -> None:
    shape = SHAPES[3]
    generator = torch.Generator().manual_seed(3)
    rows, cache = new_rows(shape, shape.batch, generator), random_cache(shape, generator)
    slots = torch.zeros(shape.batch, dtype=torch.int32)
    device = on_gpu([*rows, None, None, slots, slots, *cache])
    OPS.append_kv(*device)
    q8, scales = quantize_per_token_ref(rows[1].reshape(-1, shape.head), shape.head)
    assert torch.equal(device[7][:, :, 0].cpu().reshape(q8.shape), q8)
    assert torch.equal(device[9][:, :, 0].cpu().flatten(), scales)
    assert_same(device[0].cpu(), rows[0])  # queries are rotated only with keys
