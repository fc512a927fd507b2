"""The calibrated fit of codebook weights: less error on correlated inputs, and rounding where inputs are alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError
from qcut.numerics.codebook import lloyd_max, rotation
from qcut.numerics.codebook.fitting import fit as codebook_fit
from qcut.numerics.codebook.fitting.fit import fit
from qcut.numerics.codebook.quantizer import dequantize, quantize
from tests.support.oracles import normal


def correlated(k: int, seed: int = 1) -> Tensor:
    """The second moment of inputs with directions that differ in variance by three orders of magnitude."""
    basis, _ = torch.linalg.qr(normal(k, k, seed=seed).double())
    spectrum = torch.logspace(0, -3, k, dtype=torch.float64)
    return ((basis * spectrum) @ basis.t()).float()


def weighted(error: Tensor, h: Tensor) -> Tensor:
    """``e H e^T`` of every row, in float64."""
    error, h = error.double(), h.double()
    return ((error @ h) * error).sum(1)


# ── the fit ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bits", lloyd_max.BITS)
@pytest.mark.parametrize(("kind", "k", "group_size"), [("hadamard", 320, 128), ("qr", 200, 72), ("hadamard", 256, 256)])
def test_it_beats_rounding_on_correlated_inputs(kind: rotation.Kind, k: int, group_size: int, bits: int):
    weight, h = normal(96, k), correlated(k)
    options = {"group_size": group_size, "kind": kind, "layer": "h.0"}
    rounded = weighted(dequantize(quantize(weight, bits, **options)) - weight, h).sum()
    fitted = weighted(dequantize(fit(weight, h, bits, damping=0.01, **options)) - weight, h).sum()
    # With fine steps feedback pays the geometric mean of this spectrum, 0.22 of the arithmetic one that rounding pays.
    assert fitted < (0.7 if bits == 1 else 0.5) * rounded


def test_it_needs_no_inverse_of_what_has_none():
    # Four directions of 128, and channels that are always zero.
    x = normal(4, 128, seed=3)
    x[:, 40:60] = 0
    weight = normal(32, 128)
    q = fit(weight, x.t() @ x, damping=0.0)
    rounded = weighted(dequantize(quantize(weight)) - weight, x.t() @ x).sum()
    assert weighted(dequantize(q) - weight, x.t() @ x).sum() < 0.02 * rounded


@pytest.mark.parametrize("kind", rotation.KINDS)
@pytest.mark.parametrize("group_size", [64, 512])
def test_alike_inputs_leave_rounding_as_it_is(kind: rotation.Kind, group_size: int):
    weight = normal(16, 512)
    rounded = quantize(weight, group_size=group_size, kind=kind, norm_dtype=torch.float32)
    q = fit(weight, 3 * torch.eye(512), group_size=group_size, kind=kind, norm_dtype=torch.float32, sweeps=0)
    # The fit rotates before it divides by the norm, and a rotated H is the identity to some 1e-7: a value next to a
    # midpoint may fall otherwise, and with it the group's norm by a part in some thousand.
    assert (q.indices == rounded.indices).float().mean() > 0.999
    torch.testing.assert_close(q.norms, rounded.norms, rtol=2e-3, atol=0)


def test_every_stage_loses_less():
    weight, h = normal(64, 384), correlated(384)
    options = {"damping": 0.01, "norm_dtype": torch.float32}
    errors = [weighted(dequantize(fit(weight, h, sweeps=sweeps, **options)) - weight, h).sum() for sweeps in (0, 1, 4)]
    assert errors[1] < 0.95 * errors[0]
    assert errors[2] < 0.98 * errors[1]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_that_matter_together_are_fitted_together(bits: int):
    weight, h, g = normal(96, 256), correlated(256), correlated(96, seed=2)

    def loss(**options: Tensor) -> Tensor:
        error = (dequantize(fit(weight, h, bits, damping=0.01, **options)) - weight).double()
        return ((g.double() @ error @ h.double()) * error).sum()

    # With fine steps feedback over rows pays the geometric mean of this spectrum, 0.22 of its arithmetic mean.
    assert loss(output_moment=g) < (0.7 if bits == 2 else 0.5) * loss()


def test_rows_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch):
    weight, h = normal(50, 256), correlated(256)
    whole = fit(weight, h)
    monkeypatch.setattr(codebook_fit, "_CHUNK_ELEMENTS", 7 * 256)
    pieces = fit(weight, h)
    # A product of fewer rows may add up in another order, and one index that changes changes those after it.
    assert (pieces.indices == whole.indices).float().mean() > 0.99
    errors = [weighted(dequantize(q) - weight, h).sum() for q in (pieces, whole)]
    torch.testing.assert_close(*errors, rtol=5e-3, atol=0)
    again = fit(weight, h)
    assert torch.equal(again.indices, pieces.indices)
    assert torch.equal(again.norms, pieces.norms)


def test_a_residual_pass_fits_what_is_left():
    weight, h = normal(48, 256), correlated(256)
    first = quantize(weight, seed=5)
    second = fit(weight, h, 3, before=[first], seed=9, damping=0.01)
    assert (second.seed, len(second.values)) == (9, 8)
    alone = fit(weight - dequantize(first), h, 3, seed=9, damping=0.01)
    assert torch.equal(second.indices, alone.indices)
    assert torch.equal(second.norms, alone.norms)
    rounded = quantize(weight, seed=5)
    rounded = (rounded, quantize(weight, 3, before=[rounded], seed=9))
    errors = [weighted(dequantize(passes) - weight, h).sum() for passes in ((first, second), rounded)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_zero_rows_strides_and_dtypes(dtype: torch.dtype):
    weight = normal(128, 6).t().to(dtype)
    weight[2] = 0
    q = fit(weight, correlated(128).to(torch.float64), group_size=64)
    assert not dequantize(q)[2].any()
    assert dequantize(q).isfinite().all()
    assert torch.equal(fit(weight.contiguous(), correlated(128), group_size=64).indices, q.indices)
    assert q.norms.shape == (6, 2)
    assert q.norms.dtype is torch.float16


def test_what_is_refused():
    weight, h = normal(4, 64), torch.eye(64)
    with pytest.raises(QuantizationError, match=r"layer 'h\.0': weight holds NaN or Inf"):
        fit(weight.index_fill(0, torch.tensor(1), torch.nan), h, group_size=64, layer="h.0")
    with pytest.raises(QuantizationError, match="second moment holds NaN or Inf"):
        fit(weight, h.index_fill(0, torch.tensor(1), torch.inf), group_size=64)
    with pytest.raises(QuantizationError, match="second moment is zero"):
        fit(weight, torch.zeros(64, 64), group_size=64)
    with pytest.raises(QuantizationError, match="positive semidefinite"):
        fit(weight, torch.diag(torch.cat((torch.full((1,), -1e9), torch.full((63,), 2e7)))), group_size=64)
    with pytest.raises(ShapeError, match=r"layer 'h\.0': the second moment has shape \[64, 32\]; allowed: \[64, 64\]"):
        fit(weight, h[:, :32], layer="h.0")
    with pytest.raises(ShapeError, match=r"\[64\]"):
        fit(weight[0], h)
    with pytest.raises(DtypeError, match="int8"):
        fit(weight.to(torch.int8), h)
    with pytest.raises(ConfigError, match="damping is -1"):
        fit(weight, h, damping=-1)
    with pytest.raises(ConfigError, match=r"layer 'h\.0': a Hadamard rotation of 24 columns \(from column 64 of 88"):
        fit(normal(4, 88), torch.eye(88), group_size=64, layer="h.0")
