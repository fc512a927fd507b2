"""Experts fitted together are bitwise those fitted by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError, QuantizationError, ShapeError
from qcut.numerics.codebook.fitting import fit as codebook_fit
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.codebook.fitting.fit import experts_at_once, fit, fit_experts
from qcut.numerics.codebook.passes import quantize_weight, quantize_weights
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Codebook, parse_scheme
from tests.numerics.codebook.fitting.test_feedback import metric
from tests.support.oracles import normal

FITTED = [
    "codebook4",
    "codebook3",
    "codebook2_g64",
    "codebook3_g32",
    "codebook4+4",
    "codebook3+2_g32_qr_seed7_fp32norms",
    "codebook4_pairs",
    "codebook4_pairs_g32_qr",
    "codebook4_int8",
    "codebook4+4_int8",
    "codebook4_qr",
]


def scheme_of(name: str) -> Codebook:
    scheme = parse_scheme(name)
    assert isinstance(scheme, Codebook)
    return scheme


def experts(n: int, k: int) -> list[Tensor]:
    """Weights: an odd one in float16, two equal ones, zeros, and one that is not contiguous."""
    one = normal(n, k, seed=3)
    return [normal(n, k).half(), one, one, torch.zeros(n, k), normal(k, n, seed=4).t()]


def moments(k: int) -> list[Tensor]:
    """Second moments: three that differ, one of four directions, and one with channels that are always zero."""
    few, silent = normal(4, k, seed=5), normal(3 * k, k, seed=6)
    silent[:, : k // 3] = 0
    return [metric(k), metric(k, seed=2), 1e4 * metric(k, seed=3), few.t() @ few, silent.t() @ silent]


def assert_equal(found: RotatedCodebook, alone: RotatedCodebook) -> None:
    assert torch.equal(found.indices, alone.indices)
    assert torch.equal(found.norms, alone.norms)
    assert torch.equal(found.values, alone.values)
    assert (found.group_size, found.rotation, found.seed) == (alone.group_size, alone.rotation, alone.seed)


@pytest.mark.parametrize(("n", "k"), [(37, 192), (1, 32), (64, 128)])
@pytest.mark.parametrize("name", FITTED)
def test_fitted_together_are_those_fitted_alone(name: str, n: int, k: int):
    scheme, weights, given = scheme_of(name), experts(n, k), moments(k)
    names = [f"up.{e}" for e in range(len(weights))]
    together = quantize_weights(weights, scheme, given, names)
    for weight, moment, found in zip(weights, given, together, strict=True):
        alone = quantize_weight(weight, scheme, second_moment=moment)
        assert len(found) == len(scheme.widths)
        for one, other in zip(found, alone, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("name", ["codebook4", "codebook4_pairs", "codebook3_g64_qr"])
def test_curvature_with_outputs_is_fitted_together(name: str):
    n, k, scheme = 21, 128, scheme_of(name)
    weights = experts(n, k)
    given = [Curvature(one, metric(n, seed=e)) for e, one in enumerate(moments(k))]
    together = quantize_weights(weights, scheme, given, [None] * len(weights))
    for weight, moment, (found,) in zip(weights, given, together, strict=True):
        (alone,) = quantize_weight(weight, scheme, second_moment=moment)
        assert_equal(found, alone)
        (without,) = quantize_weight(weight, scheme, second_moment=moment.inputs)
        assert not weight.any() or not torch.equal(found.indices, without.indices)


@pytest.mark.parametrize("name", [*FITTED, "codebook4_none", "int4"])
def test_rounded_experts_are_those_rounded_alone(name: str):
    scheme, weights = scheme_of(name), experts(37, 192)
    together = quantize_weights(weights, scheme, [None] * len(weights), [None] * len(weights))
    for weight, found in zip(weights, together, strict=True):
        for one, other in zip(found, quantize_weight(weight, scheme), strict=True):
            assert_equal(one, other)


def test_experts_of_several_kinds_go_together():
    n, k, scheme = 24, 64, scheme_of("codebook4+4_g64")
    weights, h = experts(n, k), moments(k)
    given = [h[0], None, Curvature(h[2], metric(n)), h[3], None]
    together = quantize_weights(weights, scheme, given, [None] * 5)
    for weight, moment, found in zip(weights, given, together, strict=True):
        for one, other in zip(found, quantize_weight(weight, scheme, second_moment=moment), strict=True):
            assert_equal(one, other)


def test_equal_experts_under_equal_moments_are_equal():
    weight, h = normal(16, 128), metric(128)
    first, second = fit_experts([weight, weight], [Curvature(h, None)] * 2)
    assert_equal(first, second)
    assert first.indices.untyped_storage().data_ptr() != second.indices.untyped_storage().data_ptr()


@pytest.mark.parametrize("together", [1, 2, 5])
def test_groups_of_experts_change_nothing(monkeypatch: pytest.MonkeyPatch, together: int):
    n, k = 48, 128
    weights, given = experts(n, k), [Curvature(h, None) for h in moments(k)]
    alone = [fit(weight, moment.inputs, 3) for weight, moment in zip(weights, given, strict=True)]
    monkeypatch.setattr(codebook_fit, "_MOST_ROWS", together * n)
    assert experts_at_once(n, k, torch.device("cpu")) == together
    for found, other in zip(fit_experts(weights, given, 3), alone, strict=True):
        assert_equal(found, other)


def test_chunks_of_rows_are_those_of_one_expert(monkeypatch: pytest.MonkeyPatch):
    n, k = 17, 128
    monkeypatch.setattr(codebook_fit, "_CHUNK_ELEMENTS", 7 * k)
    weights, given = experts(n, k), [Curvature(h, None) for h in moments(k)]
    for weight, moment, found in zip(weights, given, fit_experts(weights, given), strict=True):
        assert_equal(found, fit(weight, moment.inputs))


@pytest.mark.parametrize(("device", "many"), [("cpu", 5), ("cuda", 13)])
def test_number_of_experts_is_bounded(device: str, many: int):
    assert experts_at_once(1536, 2048, torch.device(device)) == many
    assert experts_at_once(1 << 20, 1 << 20, torch.device(device)) == 1


def test_errors_name_the_expert():
    n, k, names = 8, 64, ["up.0", "up.1", "up.2"]
    weights, scheme = [normal(n, k, seed=e) for e in range(3)], scheme_of("codebook4_g64")
    given: list[Tensor | None] = [metric(k) for _ in weights]
    nan = [weights[0], weights[1].index_fill(0, torch.tensor(3), torch.nan), weights[2]]
    for moment in (given, [None] * 3):
        with pytest.raises(QuantizationError, match=r"'up\.1'.*NaN"):
            quantize_weights(nan, scheme, moment, names)
    with pytest.raises(QuantizationError, match=r"'up\.2'.*second moment is zero"):
        quantize_weights(weights, scheme, [*given[:2], torch.zeros(k, k)], names)
    with pytest.raises(QuantizationError, match=r"'up\.1'.*second moment holds NaN"):
        quantize_weights(weights, scheme, [given[0], torch.full((k, k), torch.inf), given[2]], names)
    with pytest.raises(ShapeError, match=r"'up\.1'.*\[64, 63\]"):
        quantize_weights(weights, scheme, [given[0], metric(k)[:, 1:], given[2]], names)
    with pytest.raises(ShapeError, match=r"'up\.2'.*\[8, 32\].*\[8, 64\]"):
        quantize_weights([*weights[:2], normal(n, 32)], scheme, [*given[:2], metric(32)], names)
    with pytest.raises(QuantizationError, match=r"'up\.1'.*float16 holds less"):
        quantize_weights([weights[0], 1e6 * weights[1], weights[2]], scheme, given, names)
    with pytest.raises(ConfigError, match=r"'up\.1'.*got a second moment"):
        quantize_weights(weights, scheme_of("codebook4_none"), [None, given[1], None], names)
    with pytest.raises(ShapeError, match="3 weights, 2 moments"):
        fit_experts(weights, [Curvature(metric(k), None)] * 2)
