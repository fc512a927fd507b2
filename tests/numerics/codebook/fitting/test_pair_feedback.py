"""Error feedback of pairs of columns: values that follow from those before them in rows and columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics.codebook import pairs, rotation
from qcut.numerics.codebook.fitting import descent
from qcut.numerics.codebook.fitting.feedback import unit_factor
from qcut.numerics.codebook.fitting.fit import fit
from qcut.numerics.codebook.fitting.pair_feedback import by_antidiagonals, by_columns, metrics
from qcut.numerics.codebook.quantizer import dequantize, quantize
from tests.numerics.codebook.fitting.test_feedback import given, metric
from tests.support.oracles import normal

BOOK = pairs.codebook()


def factor(k: int, seed: int = 1) -> Tensor:
    found = unit_factor(metric(k, seed))
    assert found is not None
    return found


def test_metrics_are_the_terms_of_two_columns():
    h, u = metric(24).double(), factor(24).double()
    pivots = torch.linalg.solve(u, torch.linalg.solve(u, h).t()).diagonal()
    for p, (upper, mixed, lower) in enumerate(metrics(metric(24), factor(24)).tolist()):
        within = u[2 * p, 2 * p + 1]
        for e0, e1 in ((1.0, 0.0), (0.0, 1.0), (0.7, -0.4)):
            want = pivots[2 * p] * e0**2 + pivots[2 * p + 1] * (e1 + within * e0) ** 2
            assert upper * e0**2 + 2 * mixed * e0 * e1 + lower * e1**2 == pytest.approx(float(want), rel=1e-3)


@pytest.mark.parametrize(("n", "k"), [(7, 16), (16, 8), (1, 10), (9, 2), (12, 12)])
def test_antidiagonals_are_the_recursion_over_rows_and_columns(n: int, k: int):
    w = normal(n, k)
    columns = (0.5 + normal(n, k // 2, seed=3).abs()).repeat_interleave(2, 1)
    u, v, forms = factor(k), factor(n, 2), metrics(metric(k), factor(k))
    error, want = torch.zeros(n, k), torch.empty(n, k // 2, dtype=torch.uint8)
    for i in range(n):
        for p in range(k // 2):
            two = slice(2 * p, 2 * p + 2)
            left = w[i, two] - columns[i, 2 * p] * BOOK  # of every pair
            terms = []
            for e in left:
                error[i, two] = e
                terms.append((v.t() @ error @ u)[i, two].square())
            upper, mixed, lower = forms[p]
            pivots = torch.stack((upper - mixed.square() / lower, lower))
            want[i, p] = int((torch.stack(terms) * pivots).sum(1).argmin())
            error[i, two] = left[int(want[i, p])]
    found = by_antidiagonals(w, columns, u, v, forms, BOOK)
    assert (pairs.join(found) == want).float().mean() > 0.98  # sums in another order: a near tie may fall otherwise


def test_rows_by_themselves_are_those_of_columns():
    w, parts, u, forms = normal(10, 256), rotation.groups(256, 128), factor(256), metrics(metric(256), factor(256))
    indices, scales = (one[0] for one in by_columns(w[None], u[None], forms[None], BOOK, parts))
    other = by_antidiagonals(w, rotation.per_column(scales, parts), u, torch.eye(10), forms, BOOK)
    # The two add up in different orders.
    assert (other == indices).float().mean() > 0.98


def test_no_single_pair_could_be_better():
    w, h, parts = normal(20, 96), metric(96), rotation.groups(96, 32)
    u, forms = factor(96), metrics(h, factor(96))
    indices, scales = (one[0] for one in by_columns(w[None], u[None], forms[None], BOOK, parts))
    columns = rotation.per_column(scales, parts)

    def loss(joined: Tensor) -> Tensor:
        e = (w - pairs.look_up(BOOK, pairs.split(joined)) * columns).double()
        return ((e @ h.double()) * e).sum(1)

    first = loss(pairs.join(indices)).sum()
    for _ in range(40):
        before, indices = indices, descent.indices(*given(w, indices, scales, h), None, BOOK, parts)[0]
    assert torch.equal(indices, before)
    best = loss(pairs.join(indices))
    assert best.sum() < first
    for p in (0, 15, 16, 47):
        for index in range(0, 256, 3):
            other = pairs.join(indices)
            other[:, p] = index
            assert (loss(other) >= best * (1 - 1e-5)).all()


@pytest.mark.parametrize("rows", ["alone", "together"])
@pytest.mark.parametrize(("kind", "k", "group_size"), [("hadamard", 320, 128), ("qr", 200, 72)])
def test_fitted_pairs_lose_less_than_rounding(kind: rotation.Kind, k: int, group_size: int, rows: str):
    weight, h, g = normal(96, k), metric(k), metric(96, seed=2) if rows == "together" else None
    weight[5] = 0
    weights = (torch.eye(96) if g is None else g).double()

    def loss(weight_now: Tensor) -> float:
        error = (weight_now - weight).double()
        return float(((weights @ error @ h.double()) * error).sum())

    options = {"group_size": group_size, "kind": kind}
    rounded = loss(dequantize(quantize(weight, in_pairs=True, **options)))
    single = loss(dequantize(fit(weight, h, output_moment=g, damping=0.01, **options)))
    q = fit(weight, h, output_moment=g, damping=0.01, in_pairs=True, **options)
    fitted = loss(dequantize(q))
    assert fitted < 0.5 * rounded
    assert fitted < 0.95 * single
    assert rows == "together" or not dequantize(q)[5].any()
    swept_less = loss(dequantize(fit(weight, h, output_moment=g, damping=0.01, in_pairs=True, sweeps=0, **options)))
    assert fitted < swept_less


def test_pairs_need_four_bits_and_even_groups():
    with pytest.raises(ConfigError, match=r"layer 'x': pairs of 2 bits a value; allowed: 4"):
        fit(normal(4, 32), torch.eye(32), 2, in_pairs=True, layer="x")
    with pytest.raises(ConfigError, match=r"layer 'x': groups of 15 of 30 columns; pairs take even numbers"):
        fit(normal(4, 30), torch.eye(30), group_size=15, kind="qr", in_pairs=True, layer="x")
