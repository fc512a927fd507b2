"""The decoder's kernels: attention within a derived bound of float64, norms near it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.dispatch.attention import Attention, select_attention
from qcut.dispatch.gpus import Target, target_named
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.scores import Scores
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.activate import ACTIVATIONS, ActivateRows
from qcut.emitters.decoder.argmax import PARTS, ArgmaxRows
from qcut.emitters.decoder.norm import NormRows
from qcut.numerics import int8 as numerics
from qcut.numerics import sampling
from tests.gpu.support.launching import Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, SMALLEST_SPACING, TORCH_DTYPE, assert_same, half_ulp

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and scales of the last dimension."""
    q, scale = numerics.quantize_per_token_ref(x.reshape(-1, x.shape[-1]).float(), x.shape[-1])
    return q.view(x.shape), scale.view(x.shape[:-1])


# ── attention ────────────────────────────────────────────────────────────────────────────────────

HEADS = ((F32, F32, 8, 2), (F16, F16, 128, 4), (BF16, BF16, 64, 1), (F16, S8, 128, 4), (F16, F16, 96, 3))
HEADS += ((F16, F16, 256, 12), (BF16, S8, 64, 8), (F32, F32, 256, 1), (F32, S8, 32, 2))
MMA_HEADS = ((F16, F16, 16, 1), (BF16, BF16, 32, 3), (F16, F16, 64, 4), (F16, F16, 80, 8), (BF16, BF16, 96, 12))
MMA_HEADS += ((F16, F16, 128, 4), (BF16, BF16, 128, 1), (F16, F16, 256, 8), (F16, S8, 16, 8), (BF16, S8, 32, 1))
MMA_HEADS += ((F16, S8, 64, 3), (BF16, S8, 80, 4), (F16, S8, 96, 1), (F16, S8, 128, 4), (BF16, S8, 256, 12))
CLUSTERED = [1, 2, 4, 8] if torch.cuda.is_available() and arch() == "sm_90a" else [1]


def attend(
    desc: Attention,
    queries: int,
    positions: list[int],
    *,
    context: int,
    kv_heads: int,
    parts: int,
    q_offset: int = 0,
    size: float = 1.0,
    value_size: float = 1.0,
) -> Tensor:
    """Launch twice into guarded memory, and hold the result to float64; what was not written yet is NaN, or 127.

    Keys and values are normal with deviations of ``size`` and ``value_size``; values of the first token are ``2**-12``
    of the others', and zero in its first head. Queries start ``q_offset`` elements off a multiple of 16 bytes.
    """
    x, cache, head, mma = desc.x, desc.cache, desc.head, isinstance(desc, AttentionMma)
    sinks = torch.linspace(-4, 9, kv_heads * queries)
    given = [sinks.to(DEVICE)] if desc.scores.sinks else []
    generator = torch.Generator().manual_seed(head + context)
    batch, dtype, width = len(positions), TORCH_DTYPE[x], kv_heads * queries * head
    q = torch.randn(batch, width + 24 + q_offset, generator=generator).to(dtype)
    kv = torch.randn(2, batch, kv_heads, context, head, generator=generator)
    kv[0] *= size
    kv[1] *= value_size
    kv[1, :, :, 0] *= 2.0**-12
    kv[1, :, 0, 0] = 0
    kv = kv.to(dtype)
    if cache is S8:
        stored, scales = quantized(kv)
        exact = stored.double() * scales[..., None].double()
    else:
        stored, scales, exact = kv, torch.empty(2, 0), kv.double()
    for b, position in enumerate(positions):
        stored[:, b, :, position + 1 :] = 127 if cache is S8 else math.nan
        if cache is S8:
            scales[:, b, :, position + 1 :] = math.nan
    q_gpu = q.to(DEVICE)[:, q_offset:]
    on_gpu = [t.contiguous().to(DEVICE) for t in (*stored, *(scales if cache is S8 else ()))]
    counters = torch.zeros(batch * kv_heads * -(-queries // desc.group), dtype=torch.int32, device=DEVICE)
    floats = max(1, desc.workspace_floats(batch, kv_heads, queries, parts))
    results = []
    for _ in range(2):
        out = Guarded(batch, width, dtype)
        workspace = torch.full((floats,), math.nan, device=DEVICE)
        launch(
            desc.emit(),
            desc.grid(batch, kv_heads, queries, parts),
            q_gpu,
            *on_gpu,
            torch.tensor(positions, dtype=torch.int32, device=DEVICE),
            out.tensor,
            workspace,
            counters,
            q.stride(0),
            kv_heads * context * head,
            kv_heads,
            queries,
            context,
            head**-0.5 * math.log2(math.e),
            *given,
        )
        results.append(out.take(width))
        assert not counters.any()
    assert_same(results[0], results[1])
    for b, position in enumerate(positions):
        mine = q[b, q_offset : q_offset + width].view(kv_heads, queries, head).double()
        keys, values = exact[:, b, :, : position + 1]
        scores = mine @ keys.transpose(1, 2) * head**-0.5
        if given:
            scores = torch.cat((scores, sinks.double().view(kv_heads, queries, 1)), 2)
        weights = scores.softmax(-1)[..., : position + 1]
        want = weights @ values
        # A score errs by head 2**-23 of its terms' sizes, an exponential by 2**-21, a sum of T terms by T 2**-23 of its
        # size; an error of a score is the same share of its weight, and weights add up to 1. A tensor core rounds every
        # eight products once more.
        sizes = (mine.abs() @ keys.abs().transpose(1, 2)) * head**-0.5
        share = (1.25 * head + 8) * 2.0**-23 * sizes.amax(-1, keepdim=True)
        share = share + 2.0**-20 + 2.0**-18 * len(given) + 1.25 * (position + 64) * 2.0**-23
        slack = 2 * share * (weights @ values.abs())
        if mma:
            # It takes weights in 16 bits: each errs by a share of itself, and below 2**-14 of the largest by half a
            # step of float16, in units in which the largest is 1, or with scales 1 / its scale.
            slack = slack + 2 * half_ulp(torch.tensor(1.0), dtype) * (weights @ values.abs())
            step = SMALLEST_SPACING[dtype] / 2
            steps = values.abs().sum(1, keepdim=True)
            if cache is S8:
                mass = scales[1, b, :, : position + 1].double().amax(1)[:, None, None]
                steps = mass * (stored[1, b, :, : position + 1].double().abs().sum(1, keepdim=True))
            slack = slack + step * (steps + (position + 1) * want.abs())
        error = (results[0][b].view(want.shape).double() - want).abs()
        assert bool((error <= slack + half_ulp(want.abs() + slack, dtype)).all())
    return results[0]


@pytest.mark.parametrize(("x", "cache", "head", "queries"), HEADS)
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_attention(x: DType, cache: DType, head: int, queries: int, parts: int) -> None:
    desc = AttentionDecode.for_shape(x, cache, head, queries, arch())
    attend(desc, queries, [0, 37, 299, 128], context=300, kv_heads=2, parts=parts)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 1000, 8191])
def test_attention_at_the_edges_of_steps(length: int) -> None:
    desc = AttentionDecode.for_shape(F16, F16, 128, 4, arch())
    for parts in {1, 2, desc.parts(1, 1, 4, 8192, 132)}:
        attend(desc, 4, [length - 1], context=8192, kv_heads=1, parts=parts)


@pytest.mark.parametrize(("x", "cache", "head", "queries"), MMA_HEADS)
@pytest.mark.parametrize("parts", [1, 2, 3, 8, 16])
def test_attention_on_tensor_cores(x: DType, cache: DType, head: int, queries: int, parts: int) -> None:
    """Sequences of several lengths; short ones leave parts without keys; through clusters and without."""
    for cluster in {1, *([parts] if parts in CLUSTERED else [])}:
        desc = AttentionMma.for_shape(x, cache, head, queries, arch(), cluster)
        lengths = (1, 500, 20, 129)
        attend(desc, queries, [n - 1 for n in lengths], context=501, kv_heads=2, parts=parts, q_offset=parts % 3)


@pytest.mark.parametrize("cache", [F16, S8])
@pytest.mark.parametrize("cluster", CLUSTERED)
def test_attention_on_tensor_cores_at_the_edges_of_tiles(cache: DType, cluster: int) -> None:
    lengths = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 500)
    desc = AttentionMma.for_shape(F16, cache, 128, 4, arch(), cluster)
    together = attend(desc, 4, [n - 1 for n in lengths], context=500, kv_heads=1, parts=cluster)
    assert len({row.sum().item() for row in together}) == len(lengths)


@pytest.mark.parametrize(("x", "cache", "head", "queries"), MMA_HEADS)
def test_attention_on_tensor_cores_of_few_tiles(x: DType, cache: DType, head: int, queries: int) -> None:
    """Contexts that a warp's tiles hold, and longer ones."""
    for tokens in (64, 100):
        desc = AttentionMma.for_shape(x, cache, head, queries, arch()).shortened(tokens)
        attend(desc, queries, [n - 1 for n in (1, 17, 64, 65, 100, 300)], context=301, kv_heads=2, parts=1)


@pytest.mark.parametrize(("x", "cache", "head", "queries"), HEADS)
@pytest.mark.parametrize("parts", [1, 3])
def test_sinks(x: DType, cache: DType, head: int, queries: int, parts: int) -> None:
    desc = AttentionDecode.for_shape(x, cache, head, queries, arch(), Scores(sinks=True))
    attend(desc, queries, [0, 37, 299, 128], context=300, kv_heads=2, parts=parts)


@pytest.mark.parametrize(("x", "cache", "head", "queries"), MMA_HEADS)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_sinks_on_tensor_cores(x: DType, cache: DType, head: int, queries: int, parts: int) -> None:
    """Once, whether parts meet in a cluster, in a workspace, or not at all."""
    for cluster in {1, *([parts] if parts in CLUSTERED else [])}:
        desc = AttentionMma.for_shape(x, cache, head, queries, arch(), cluster, scores=Scores(sinks=True))
        attend(desc, queries, [0, 499, 19, 128], context=501, kv_heads=2, parts=parts, q_offset=parts % 3)


@pytest.mark.parametrize("x", [F16, BF16])
@pytest.mark.parametrize("cache", ["x", S8])
def test_attention_on_tensor_cores_of_scores_far_apart(x: DType, cache: Any) -> None:
    """Weights that underflow, maxima that come late."""
    desc = AttentionMma.for_shape(x, x if cache == "x" else cache, 64, 5, arch())
    attend(desc, 5, [299, 40], context=300, kv_heads=2, parts=2, size=40.0)


@pytest.mark.parametrize("value_size", [2.0**-13, 2.0**13])
def test_attention_on_tensor_cores_of_small_and_large_scales(value_size: float) -> None:
    """Scales that float16 weights would not survive."""
    desc = AttentionMma.for_shape(F16, S8, 64, 5, arch())
    attend(desc, 5, [299, 40], context=300, kv_heads=2, parts=2, value_size=value_size)


def test_chosen_attention_of_a_long_context() -> None:
    desc, parts = select_attention(F16, F16, 128, 4, Target(arch(), 132), batch=1, kv_heads=1, context=8192)
    assert isinstance(desc, AttentionMma)
    attend(desc, 4, [8190], context=8192, kv_heads=1, parts=parts)


@pytest.mark.parametrize("cache", [F16, S8])
def test_attention_on_tensor_cores_keeps_nan_that_is_read(cache: DType) -> None:
    """A NaN value, or the NaN scale that the quantizer gives it, is in all of its head's results and no other's."""
    desc = AttentionMma.for_shape(F16, cache, 64, 2, arch())
    q = torch.randn(1, 4 * 64, dtype=torch.float16, device=DEVICE)
    kv = torch.randn(2, 2, 40, 64).half()
    kv[1, 1, 17, 5] = math.nan
    stored, scales = quantized(kv) if cache is S8 else (kv, torch.empty(2, 0))
    caches = [t.contiguous().to(DEVICE) for t in (*stored, *(scales if cache is S8 else ()))]
    out = torch.empty(2, 2, 64, dtype=torch.float16, device=DEVICE)
    workspace, counters = torch.empty(1, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    position = torch.tensor([39], dtype=torch.int32, device=DEVICE)
    sizes = (4 * 64, 2 * 40 * 64, 2, 2, 40, 0.125)
    launch(desc.emit(), desc.grid(1, 2, 2, 1), q, *caches, position, out, workspace, counters, *sizes)
    want = torch.zeros(2, 2, 64, dtype=torch.bool)
    want[1] = True
    if cache is not S8:
        want[1, :, :5] = want[1, :, 6:] = False
    assert_same(out.isnan().cpu(), want)


@pytest.mark.parametrize("form", [AttentionDecode, AttentionMma])
def test_attention_of_one_value_is_that_value(form: Any) -> None:
    """Whatever the scores: large ones, equal ones."""
    x, dtype, tolerance = (F32, torch.float32, 1e-6) if form is AttentionDecode else (F16, torch.float16, 0.0)
    desc = form.for_shape(x, x, 64, 1, arch())
    q = torch.full((1, 64), 1e4, dtype=dtype, device=DEVICE)
    keys = torch.full((1, 1, 50, 64), 1e4, dtype=dtype, device=DEVICE)
    values = torch.linspace(-3, 3, 64, device=DEVICE).to(dtype).expand(1, 1, 50, 64).contiguous()
    out = torch.empty(1, 64, dtype=dtype, device=DEVICE)
    workspace, counters = torch.empty(4096, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    position = torch.tensor([49], dtype=torch.int32, device=DEVICE)
    rest: tuple[Any, ...] = (position, out, workspace, counters, 64, 50 * 64, 1, 1, 50, 1.0)
    launch(desc.emit(), desc.grid(1, 1, 1, 2), q, keys, values, *rest)
    assert torch.allclose(out, values[0, 0, :1], rtol=tolerance, atol=0.0)


# ── norms ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("k", "aligned"), [(64, True), (172, False), (1280, True), (4096, True), (14336, True)])
def test_norms(x: DType, layer: bool, residual: bool, k: int, aligned: bool) -> None:
    dtype, m, extra = TORCH_DTYPE[x], 5, 8 if aligned else 3
    desc = NormRows.for_shape(x, layer, arch(), k, residual=residual, aligned=aligned)
    rows, added = (torch.randn(m, k + extra).mul(s).to(dtype) for s in (3, 1))
    weight, bias = (1 + 0.3 * torch.randn(k)).to(dtype), torch.randn(k).to(dtype)
    total = Guarded(m, k + extra, dtype)
    out = Guarded(m, k, dtype)
    given = [rows.to(DEVICE), *([added.to(DEVICE), total.tensor] if residual else []), weight.to(DEVICE)]
    given += [bias.to(DEVICE)] if layer else []
    launch(desc.emit(), desc.grid(m), *given, out.tensor, k + extra, k, 1e-5)
    s = rows[:, :k]
    if residual:
        s = (rows + added)[:, :k]
        assert_same(total.take(k), s)
    exact = s.double()
    w = weight.double()
    if layer:
        want = F.layer_norm(exact, (k,), w, bias.double(), 1e-5)
        sizes, rounding = (want - bias.double()).abs() + 4 * w.abs(), 0.0 * w
    else:
        scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
        want = scaled * w
        # Rounded to T before the weight multiplies it, to either side of a power of two.
        sizes, rounding = want.abs(), half_ulp(scaled.abs() * (1 + 2.0**-10), dtype) * w.abs()
    # A sum of k squares errs by k 2**-24 of itself; then come a few roundings of float32.
    slack = sizes * ((k + 16) * 2.0**-23) + rounding + 1e-6
    error = (out.take(k).double() - want).abs()
    assert bool((error <= slack + half_ulp(want.abs() + slack, dtype)).all())


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("k", "aligned"), [(77, False), (1280, True), (5120, True)])
def test_quantized_norms_are_the_norms_quantized(x: DType, layer: bool, k: int, aligned: bool) -> None:
    dtype, m, k_padded = TORCH_DTYPE[x], 4, -(-k // 16) * 16
    rows = torch.randn(m, k).to(dtype).to(DEVICE)
    rows[2] = 0
    rows[3, k // 2] = math.nan
    weight, bias = torch.randn(2, k).to(dtype).to(DEVICE)
    biases = [bias] if layer else []
    desc = NormRows.for_shape(x, layer, arch(), k, aligned=aligned)
    plain = torch.empty(m, k, dtype=dtype, device=DEVICE)
    launch(desc.emit(), desc.grid(m), rows, weight, *biases, plain, k, k, 1e-5)
    desc = NormRows.for_shape(x, layer, arch(), k, aligned=aligned, quantized=True)
    q, scale = Guarded(m, k_padded, torch.int8), Guarded(m, 1, torch.float32)
    launch(desc.emit(), desc.grid(m), rows, weight, *biases, q.tensor, scale.tensor, k, k, k_padded, 1e-5)
    want_q, want_scale = numerics.quantize_per_token_ref(plain.cpu(), k_padded)
    assert_same(q.take(k_padded), want_q)
    assert_same(scale.take(1)[:, 0], want_scale)


# ── activations ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("columns", "aligned"), [(8, True), (172, False), (1000, True), (5120, True)])
def test_activations(x: DType, kind: str, columns: int, aligned: bool) -> None:
    dtype, m, extra = TORCH_DTYPE[x], 7, 8 if aligned else 3
    rows, up = (torch.randn(m, columns + extra).mul(s).to(dtype) for s in (4, 1))
    rows[0, 0], rows[1, 0], rows[2, 0] = 80.0, -80.0, math.nan
    gated = kind != "gelu_tanh"
    alpha, limit, plus_one = numbers = (1.702, 7.0, 1) if kind == "clamped_silu_mul" else (1.0, math.inf, 0)
    desc = ActivateRows(kind, x, arch(), aligned)
    out = Guarded(m, columns, dtype)
    given = [rows.to(DEVICE), *([up.to(DEVICE)] if gated else [])]
    strides = [columns + extra] * len(given)
    absmax = torch.zeros(m, device=DEVICE)
    more = numbers if kind == "clamped_silu_mul" else ()
    launch(desc.emit(), desc.grid(m, columns), *given, out.tensor, absmax, *strides, columns, *more)
    largest = torch.zeros(m)
    numerics.raise_absmax(largest, out.take(columns))
    assert_same(absmax.cpu(), largest)
    exact = rows[:, :columns].double().clamp(max=limit)
    logit = alpha * exact if gated else 2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    want = exact * logit.sigmoid()
    slack = exact.abs() * 2.0**-21  # what ActivateRows states
    slack = slack + (half_ulp(want.abs() + slack, dtype) if gated else 0)
    if gated:
        factor = (up[:, :columns].clamp(-limit, limit) + plus_one).double()  # rounded to the type, as the kernel does
        want, slack = want * factor, slack * factor.abs()
    error = (out.take(columns).double() - want).abs()
    near = error <= slack + half_ulp(want.abs() + slack, dtype)
    assert bool(near[~want.isnan()].all())
    assert_same(out.take(columns).isnan(), want.isnan())


# ── argmax ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize("columns", [1, 3, 31, 512, 8192, 50257, 128256])
def test_argmax(x: DType, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(11, columns + 5, generator=generator).to(TORCH_DTYPE[x])
    special = (math.nan, math.inf, -math.inf, 0.0, -0.0)
    for row, value in enumerate(special):
        logits[row, torch.randint(0, columns, (columns // 2,), generator=generator)] = value
    logits[5] = math.nan
    logits[6] = -math.inf
    logits[7, :columns] = -logits[7, :columns].abs() - 1
    logits[8, :columns] = 3.0  # equals: the first
    logits[9, columns - 1] = 100.0
    logits[10, 0] = 100.0
    logits[:, columns:] = math.inf  # beyond the row
    best = torch.full((12,), -7, dtype=torch.int64, device=DEVICE)
    if target_named(arch()).exchanges_in_clusters:
        split, found = ArgmaxRows(x, arch(), parts=PARTS), torch.full((12,), -7, dtype=torch.int64, device=DEVICE)
        launch(split.emit(), split.grid(11), logits.to(DEVICE), found, columns + 5, columns)
        assert found.tolist() == [*sampling.argmax(logits[:, :columns]).tolist(), -7]
    desc = ArgmaxRows(x, arch())
    launch(desc.emit(), desc.grid(11), logits.to(DEVICE), best, columns + 5, columns)
    assert best.tolist() == [*sampling.argmax(logits[:, :columns]).tolist(), -7]
    positions, slots = (torch.arange(k, k + 12, dtype=torch.int32, device=DEVICE) for k in (0, 1))
    desc, again = ArgmaxRows(x, arch(), advances=True), torch.full_like(best, -7)
    sizes = (columns + 5, columns, 9)
    launch(desc.emit(), desc.grid(11), logits.to(DEVICE), again, positions, slots, *sizes)
    assert torch.equal(again, best)
    assert positions.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 11]
    assert slots.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 12]
    host_copy = torch.full((3, 11), -7, dtype=torch.int64, pin_memory=True)
    turn = (torch.arange(11, dtype=torch.int32, device=DEVICE) % 3).contiguous()
    for parts in (1, PARTS) if target_named(arch()).exchanges_in_clusters else (1,):
        desc = ArgmaxRows(x, arch(), True, parts, True)
        args = (logits.to(DEVICE), again, positions, slots, *sizes, host_copy, turn, 3)
        for shift in range(3):
            launch(desc.emit(), desc.grid(11), *args)
            torch.cuda.synchronize()
            assert [host_copy[(row + shift) % 3, row].item() for row in range(11)] == best[:11].tolist()
        host_copy.fill_(-7)
    assert turn.tolist() == [row % 3 for row in range(11)]
