"""Formats of other libraries: their levels, errors and bits by definition, and the libraries' own results."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.perplexity.roundings import (
    ROUNDINGS,
    Rounded,
    dynamic_floats,
    int4,
    lut_b,
    mxfp4,
    nf4,
    normal_floats,
    nvfp4,
    q4_0,
    q4_k_fields,
    q4_k_like,
)
from qcut.numerics.float8 import E4M3

CPU = torch.device("cpu")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def weight(n: int = 16, k: int = 512, seed: int = 0) -> Tensor:
    """Normal weights, with outliers, a row of zeros and one of a single value."""
    made = 0.05 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    made[1, 3], made[2], made[3] = 2.0, 0.0, 0.03
    return made


def blocks(x: Tensor, size: int) -> Tensor:
    return x.reshape(-1, size)


BITS: dict[str, float] = {
    "NF4": 4 + 32 / 64,
    "NF4 nested": 4 + 8 / 64 + 32 / (64 * 128) + 32 / (16 * 512),  # 128 blocks, and the mean
    "int4 symmetric": 4 + 16 / 128,
    "int4 asymmetric": 4 + 20 / 128,
    "Q4_0": 4 + 16 / 32,
    "Q4_K-like": 4 + (8 * 12 + 32) / 256,
    "MXFP4": 4 + 8 / 32,
    "NVFP4": 4 + 8 / 16 + 32 / (16 * 512),
    "LUT-B": 3 + 8 * 8 / 512,
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_formats_have_their_bits_and_levels(name: str) -> None:
    w = weight()
    found = ROUNDINGS[name][1](w)
    assert found.bits / w.numel() == BITS[name]
    assert (found.weight.shape, found.weight.dtype) == (w.shape, torch.float32)
    size = {"NF4": 64, "NF4 nested": 64, "Q4_0": 32, "Q4_K-like": 32, "MXFP4": 32, "NVFP4": 16}.get(name, 128)
    most = 8 if name == "LUT-B" else 15 if name.endswith("FP4") else 16
    groups = found.weight[:8, :64].reshape(1, -1) if name == "LUT-B" else blocks(found.weight, size)
    assert max(len(group.unique()) for group in groups) <= most
    if name not in ("NF4 nested", "LUT-B"):
        assert torch.equal(found.weight[2], w[2])  # a row of zeros
        torch.testing.assert_close(found.weight[3], w[3], rtol=0.25, atol=0)  # and one of a single value
    rest = found.weight[4:] - w[4:]
    assert 0.001 < float(rest.square().mean() / w[4:].square().mean()) < 0.06


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(24, 384)
    for nested, far in ((False, 1e-5), (True, 0.01)):  # its nested scales are not always the nearest
        packed, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=nested)
        want = functional.dequantize_4bit(packed, state)
        torch.testing.assert_close(nf4(w, nested=nested).weight, want, rtol=far, atol=1e-4 if nested else 1e-7)
    torch.testing.assert_close(dynamic_floats(CPU), functional.create_dynamic_map(), rtol=1e-6, atol=0)
    torch.testing.assert_close(normal_floats(CPU), state.code, rtol=1e-5, atol=1e-7)


def test_q4_0_is_ggufs_bit_for_bit() -> None:
    gguf = pytest.importorskip("gguf")
    w = weight(24, 384)
    kind = gguf.GGMLQuantizationType.Q4_0
    packed = gguf.quantize(w.numpy(), kind)
    found = q4_0(w)
    assert found.bits == 8 * packed.nbytes
    assert torch.equal(found.weight, torch.from_numpy(gguf.dequantize(packed, kind)))


def test_q4_k_is_what_gguf_reads() -> None:
    """Fields, packed as the format defines, are to gguf the same weights."""
    gguf = pytest.importorskip("gguf")
    w = weight(24, 256)
    (d, s), (e, m), q = q4_k_fields(w)
    (s0, s1), (m0, m1), q = s.byte().split(4, 1), m.byte().split(4, 1), q.byte()
    scales = torch.cat((s0 | (s1 >> 4) << 6, m0 | (m1 >> 4) << 6, (s1 & 15) | (m1 & 15) << 4), 1)
    codes = (q[:, ::2] | q[:, 1::2] << 4).flatten(1)
    packed = torch.cat((d.half().view(torch.uint8), e.half().view(torch.uint8), scales, codes), 1).numpy()
    found = q4_k_like(w)
    assert found.bits == 8 * packed.nbytes
    assert torch.equal(found.weight, torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_K)))


def test_q4_k_search_beats_span() -> None:
    w = weight(64, 512)[4:]
    groups = blocks(w, 32)
    low = groups.amin(1, keepdim=True).clamp(max=0)
    step = (groups.amax(1, keepdim=True) - low) / 15
    spanned = ((groups - low) / step).round() * step + low  # steps and least values in float32
    error, others = ((made - groups).square().mean() for made in (blocks(q4_k_like(w).weight, 32), spanned))
    assert error < 0.9 * others


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_is_within_half_a_step(symmetric: bool) -> None:
    w = weight()
    found = int4(w, symmetric=symmetric).weight
    for group, made in zip(blocks(w, 128), blocks(found, 128), strict=True):
        low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
        step = 2 * max(-low, high) / 15 if symmetric else (high - low) / 15
        # A half for rounding, another for the zero point, and for 8 steps above 0 where 7 are; float16 has 11 bits.
        assert float((group - made).abs().max()) <= step * (1.0 + 16 * 2**-11)
        inside = group[(group > low + step) & (group < high - step)]
        kept = made[(group > low + step) & (group < high - step)]
        assert float((inside - kept).abs().max()) <= step * (0.5 + 16 * 2**-11) if len(inside) else True


def nearest_e2m1(x: float) -> set[float]:
    """The nearest values, one or two."""
    values = {sign * v for sign, v in product((1.0, -1.0), E2M1)}
    least = min(abs(x - v) for v in values)
    return {v for v in values if abs(x - v) <= least * (1 + 1e-6)}


def mx_scales(w: Tensor) -> list[float]:
    return [2.0 ** (math.floor(math.log2(m)) - 2) if m else 0.0 for m in blocks(w, 32).abs().amax(1).tolist()]


def nv_scales(w: Tensor) -> list[float]:
    whole = 448 * 6 / float(w.abs().max())
    norms = torch.tensor([whole * m / 6 for m in blocks(w, 16).abs().amax(1).tolist()]).clamp(max=448).to(E4M3)
    return [float(norm) / whole for norm in norms]


@pytest.mark.parametrize(("rounding", "scales", "size"), [(mxfp4, mx_scales, 32), (nvfp4, nv_scales, 16)])
def test_4_bit_floats_are_the_nearest(
    rounding: Callable[[Tensor], Rounded], scales: Callable[[Tensor], list[float]], size: int
) -> None:
    w = weight(8, 128)
    found = rounding(w).weight
    for group, made, scale in zip(blocks(w, size), blocks(found, size), scales(w), strict=True):
        for x, y in zip(group.tolist(), made.tolist(), strict=True):
            wanted = nearest_e2m1(x / scale) if scale else {0.0}
            assert any(y == pytest.approx(scale * v, rel=1e-5, abs=1e-12) for v in wanted)


def test_lut_b_tables_are_e4m3_and_local() -> None:
    w = weight(16, 128)
    found = lut_b(w).weight
    assert torch.equal(found.to(E4M3).float(), found)
    changed = w.clone()
    changed[8:, 64:] *= 3  # one tile
    other = lut_b(changed).weight
    assert torch.equal(other[:8], found[:8])
    assert torch.equal(other[8:, :64], found[8:, :64])
    tile, made = w[:8, 64:].flatten(), found[:8, 64:].flatten()
    nearest = (tile[:, None] - made.unique()).abs().amin(1)
    torch.testing.assert_close((tile - made).abs(), nearest)
