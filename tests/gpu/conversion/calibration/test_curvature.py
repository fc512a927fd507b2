"""Curvatures of a model on the GPU, in float32 and in float16."""

from __future__ import annotations

import copy

import pytest
import torch

import qcut
from tests.support.zoo import tiny_lm, token_batches


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.05), (torch.float16, 0.2), (torch.bfloat16, 0.4)])
def test_curvatures_are_those_of_the_cpu(dtype: torch.dtype, tolerance: float):
    model, batches = tiny_lm(), token_batches(8)
    want = qcut.collect_curvature(model, batches, loss="tokens", progress=False)
    there = copy.deepcopy(model).to("cuda", dtype)
    found = qcut.collect_curvature(there, batches, loss="tokens", progress=False)
    # Of 256 drawn labels some differ, where cumulated probabilities differ by a rounding.
    for name, one in want.items():
        got = found[name]
        assert got.inputs.is_cuda
        assert got.inputs.dtype is torch.float32
        for a, b in ((got.inputs, one.inputs), (got.outputs, one.outputs)):
            assert a is not None
            assert b is not None
            assert float((a.cpu() - b).norm() / b.norm()) < tolerance, name
    report = qcut.quantize(
        there.half(), "codebook4", second_moments=found, allow_growth=True, prebuild=(), progress=False
    )
    assert set(report.schemes.values()) == {"codebook4"}
