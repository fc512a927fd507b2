"""Codebook weights fitted on the GPU: what the CPU's fit reaches, run to run the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qcut.numerics.codebook.fitting.fit import fit
from qcut.numerics.codebook.quantizer import RotatedCodebook, dequantize, quantize
from tests.numerics.codebook.fitting.test_feedback import metric
from tests.support.oracles import normal

N, K = 192, 384


def loss(q: RotatedCodebook, weight: Tensor, h: Tensor, g: Tensor) -> float:
    error = (dequantize(q).cpu() - weight).double()
    return float(((g.double() @ error @ h.double()) * error).sum())


@pytest.mark.parametrize("in_pairs", [False, True], ids=["values", "pairs"])
@pytest.mark.parametrize("rows", ["alone", "together"])
def test_the_gpu_fits_as_well_as_the_cpu(rows: str, in_pairs: bool):
    weight, h = normal(N, K), metric(K)
    g = metric(N, seed=2) if rows == "together" else None
    weights = torch.eye(N) if g is None else g
    there = fit(weight, h, output_moment=g, damping=0.01, in_pairs=in_pairs)
    here = fit(weight.cuda(), h, output_moment=g, damping=0.01, in_pairs=in_pairs)
    assert here.indices.is_cuda
    # Sums in another order change an index, and that one those after it; the loss stays.
    torch.testing.assert_close(loss(here, weight, h, weights), loss(there, weight, h, weights), rtol=0.02, atol=0)
    assert loss(here, weight, h, weights) < 0.5 * loss(quantize(weight, in_pairs=in_pairs), weight, h, weights)
    again = fit(weight.cuda(), h, output_moment=g, damping=0.01, in_pairs=in_pairs)
    assert torch.equal(again.indices, here.indices)
    assert torch.equal(again.norms, here.norms)
