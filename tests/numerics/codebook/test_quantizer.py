"""The quantizer of codebook weights: its error, its indices, passes over what is left, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError
from qcut.numerics import chunks
from qcut.numerics.codebook import lloyd_max, rotation
from qcut.numerics.codebook.quantizer import CLOSER, MULTIPLES, RotatedCodebook, dequantize, quantize, quantize_plain
from tests.support.oracles import normal

DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501}
"""Mean squared errors of the Lloyd-Max codebooks on N(0, 1)."""
GAIN = {1: 0.98, 2: 0.955, 3: 0.9, 4: 0.82}
"""What the best multiple of a norm makes of these errors, in groups of 64 and 128 normal values."""


@pytest.mark.parametrize("bits", lloyd_max.BITS)
@pytest.mark.parametrize("kind", rotation.KINDS)
def test_the_error_is_the_codebooks(kind: rotation.Kind, bits: int):
    # A weight with outliers: only its rotation is nearly normal.
    weight = normal(64, 320) * (1 + 3 * (normal(64, 320, seed=1) > 1))
    q = quantize(weight, bits, group_size=128, kind=kind, norm_dtype=torch.float32)
    assert q.norms.shape == (64, 3)
    error = (dequantize(q) - weight).square().sum() / weight.square().sum()
    # A coordinate of a point on a sphere of 64 or 128 dimensions has lighter tails than N(0, 1), outliers or not; and
    # a norm that suits the group's own largest values is worth the more the more values the codebook has.
    assert 0.95 < float(error) / (GAIN[bits] * DISTORTION[bits]) < 1.05


def rounded(numbers: Tensor, scale: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The squared error of rows under a scale each, and their indices."""
    nearest = (numbers[..., None] / scale[:, None, None] - values).abs().argmin(-1)
    return (numbers - scale[:, None] * values[nearest]).square().sum(1), nearest


def best_of(numbers: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """Of scales ``[S, R]``, each row's best."""
    errors = torch.stack([rounded(numbers, scale, values)[0] for scale in scales])
    return scales.gather(0, errors.argmin(0, keepdim=True))[0]


def test_norms_are_the_best_multiples_of_the_groups():
    weight = normal(8, 160)
    q = quantize(weight, 3, group_size=64, kind="qr", seed=5, norm_dtype=torch.float32)
    for g, (first, d) in enumerate(((0, 64), (64, 64), (128, 32))):
        columns = slice(first, first + d)
        rotated = rotation.rotate(weight[:, columns], "qr", 5 + first).double()
        size = rotated.norm(dim=1) * d**-0.5
        best = best_of(rotated, torch.stack([multiple * size for multiple in MULTIPLES]), q.values)
        best = best_of(rotated, torch.stack([best, *(factor * best for factor in CLOSER)]), q.values)
        indices = rounded(rotated, best, q.values)[1]
        assert torch.equal(q.indices[:, columns].long(), indices)
        chosen = q.values[indices].double()
        norm = (rotated * chosen).sum(1) / chosen.square().sum(1) * d**0.5
        torch.testing.assert_close(q.norms[:, g].double(), norm, rtol=1e-6, atol=0)


def test_zero_rows_strides_and_short_groups():
    weight = normal(80, 6).t()
    weight = torch.where(torch.arange(6)[:, None] == 2, 0.0, weight)
    q = quantize(weight, group_size=64)
    assert not dequantize(q)[2].any()
    assert torch.equal(quantize(weight.contiguous(), group_size=64).indices, q.indices)
    assert quantize(weight, group_size=1 << 20, kind="qr").norms.shape == (6, 1)
    assert quantize(weight.half(), group_size=16).norms.dtype is torch.float16


def test_weights_that_are_refused():
    with pytest.raises(QuantizationError, match=r"layer 'h\.0': .*NaN or Inf"):
        quantize(torch.tensor([[float("nan")]]), layer="h.0")
    with pytest.raises(QuantizationError, match=r"norm is 1\.061e\+10; torch.float16 holds less"):
        quantize(torch.full((1, 4), 5e9))
    with pytest.raises(ShapeError, match=r"\[0, 4\]"):
        quantize(torch.zeros(0, 4))
    with pytest.raises(DtypeError, match="int8"):
        quantize(torch.zeros(1, 4, dtype=torch.int8))
    with pytest.raises(ConfigError, match=r"layer 'h\.0': .*rotation of 96 columns \(from column 128 of 224"):
        quantize(torch.ones(1, 224), layer="h.0")
    good = quantize(torch.ones(2, 8))
    for bad in ({"norms": good.norms[:1]}, {"values": good.values[:2]}):
        with pytest.raises(ShapeError):
            dequantize(RotatedCodebook(**{**good.__dict__, **bad}))


def two_passes(
    weight: Tensor, bits: int, residual_bits: int, **options: Any
) -> tuple[RotatedCodebook, RotatedCodebook]:
    first = quantize(weight, bits, **options)
    return first, quantize(weight, residual_bits, before=[first], seed=1042, **options)


@pytest.mark.parametrize("kind", rotation.KINDS)
def test_rows_do_not_depend_on_the_chunk(kind: rotation.Kind, monkeypatch: pytest.MonkeyPatch):
    weight = normal(50, 320)
    whole = two_passes(weight, 4, 2, kind=kind)
    restored = dequantize(whole)
    monkeypatch.setattr(chunks, "ELEMENTS", 7 * 320)
    pieces = two_passes(weight, 4, 2, kind=kind)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(a.norms, b.norms)
        assert torch.equal(a.indices, b.indices)
    # A dense rotation of fewer rows may add up in another order.
    torch.testing.assert_close(dequantize(pieces), restored, rtol=0, atol=0 if kind == "hadamard" else 1e-5)


@pytest.mark.parametrize(("bits", "residual_bits"), [(4, 4), (4, 2), (2, 3)])
def test_error_of_two_stages_is_the_product(bits: int, residual_bits: int):
    weight = normal(64, 512)
    first, second = two_passes(weight, bits, residual_bits, norm_dtype=torch.float32)
    assert torch.equal(first.indices, quantize(weight, bits).indices)
    restored = dequantize((first, second))
    torch.testing.assert_close(restored, dequantize(first) + dequantize(second), rtol=0, atol=0)
    assert torch.equal(second.indices, quantize(weight - dequantize(first), residual_bits, seed=1042).indices)
    error = (restored - weight).square().sum() / weight.square().sum()
    expected = GAIN[bits] * DISTORTION[bits] * GAIN[residual_bits] * DISTORTION[residual_bits]
    assert 0.85 < float(error) / expected < 1.05


def test_passes_that_do_not_fit_each_other():
    with pytest.raises(ShapeError, match=r"shapes \[\[2, 8\], \[2, 16\]\]"):
        dequantize((quantize(normal(2, 8)), quantize(normal(2, 16))))
    with pytest.raises(ShapeError, match="one pass or more"):
        dequantize(())


def test_weights_without_a_rotation():
    weight = normal(6, 100) * 3
    weight[2, :48] = 0
    step = quantize_plain(weight, 4, group_size=48, levels="steps")
    assert (step.rotation, step.norms.shape, step.values.tolist()) == ("none", (6, 3), list(range(-8, 8)))
    for first, d, g in ((0, 48, 0), (48, 48, 1), (96, 4, 2)):
        w = weight[:, first : first + d]
        norm = (w.abs().amax(1) / 7.5).half()
        assert torch.equal(step.norms[:, g], norm)
        nearest = (w / torch.where(norm > 0, norm.float(), 1.0)[:, None]).round().clamp(-8, 7)
        assert torch.equal(step.indices[:, first : first + d], (nearest + 8).to(torch.uint8))
        assert torch.equal(dequantize(step)[:, first : first + d], nearest * norm.float()[:, None])
    levels = quantize_plain(weight, 3, group_size=48, levels="normal", norm_dtype=torch.float32)
    assert torch.equal(levels.values, lloyd_max.codebook(3))
    restored = dequantize(levels)
    assert not restored[2, :48].any()
    assert not restored.signbit()[2, :48].any()
    rest = quantize_plain(weight, 2, before=[levels], group_size=48, levels="normal")
    assert torch.equal(rest.indices, quantize_plain(weight - restored, 2, group_size=48, levels="normal").indices)
    assert torch.equal(dequantize((levels, rest)), restored + dequantize(rest))
