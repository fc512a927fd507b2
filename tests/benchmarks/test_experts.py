"""The rules of the benchmark of moments for experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcut
from benchmarks.perplexity.experts import EXPERTS, by_rule
from qcut.numerics.codebook.fitting.curvature import as_curvature
from tests.support.mixtures import mixture_batches, tiny_mixture


@pytest.mark.parametrize("collect", [qcut.collect_second_moments, qcut.collect_curvature])
def test_shrunk_moments_are_those_that_are_collected(collect: Any) -> None:
    model, batches = tiny_mixture(), mixture_batches()
    raw = collect(model, batches, EXPERTS, prior=0.0, progress=False)
    found = by_rule(raw, "shrunk", 4.0)
    for name, wanted in collect(model, batches, EXPERTS, prior=4.0, progress=False).items():
        one, other = found[name], as_curvature(wanted)
        torch.testing.assert_close(one.inputs, other.inputs, rtol=1e-4, atol=1e-4)
        if other.outputs is not None:
            assert one.outputs is not None
            torch.testing.assert_close(one.outputs, other.outputs, rtol=1e-3, atol=1e-2)
    own, mean = by_rule(raw, "own", 0.0), by_rule(raw, "all", 1e9)
    name, other_name = "model.layers.0.mlp.experts.down.0", "model.layers.0.mlp.experts.down.1"
    torch.testing.assert_close(own[name].inputs, as_curvature(raw[name]).inputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean[name].inputs, mean[other_name].inputs, rtol=1e-4, atol=1e-4)
