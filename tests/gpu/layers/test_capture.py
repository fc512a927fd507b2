"""Layers with a first call of all that a CUDA graph captures."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import qcut
from tests.gpu.support.oracles import DEVICE, assert_same

SCHEMES = (
    "w8a8",
    "w8a8_rotated",
    "w8a8_static",
    "w8a16",
    "fp8_dynamic",
    "fp8_static",
    "fp8",
    "fp8_blocks",
    "int16x8",
    "codebook4",
    "codebook4_int8",
    "codebook4_pairs",
    "codebook4_g64_qr",
    "codebook3",
)
TRITON = ("w8a8", "w8a8_static", "w8a16", "int16x8", "codebook4_g64_qr")
"""Where the last group is smaller, torch rotates on the Triton back end, and copies signs in each call."""
K, N = 320, 208
"""Sizes of no other test, so that no kernel, constant or tile is there before the capture."""


def fresh_layer(scheme: str) -> qcut.Linear:
    torch.manual_seed(0)
    static_range = qcut.StaticRange(-4.0, 4.0) if scheme.endswith("_static") else None
    linear = nn.Linear(K, N, dtype=torch.float16)
    return qcut.Linear.from_float(linear, scheme, static_range=static_range).to(DEVICE)


@pytest.mark.parametrize(
    ("scheme", "path"),
    [*((scheme, "cuda") for scheme in SCHEMES), *((scheme, "triton") for scheme in TRITON)],
)
def test_first_call_can_be_captured(scheme: str, path: str) -> None:
    gc.collect()  # what other tests have left must not be collected, and synchronized with, under the capture
    layer = fresh_layer(scheme)
    x, other = (torch.randn(5, K, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE) for seed in (1, 2))
    given, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.no_grad(), qcut.execution_path(path):
        with torch.cuda.graph(graph):
            y = layer(given)
        for tokens in (x, other):
            given.copy_(tokens)
            graph.replay()
            assert_same(y, layer(tokens))


@pytest.mark.parametrize("scheme", ["w8a16", "codebook4"])
def test_first_lookup_can_be_captured(scheme: str) -> None:
    embedding = qcut.Embedding.from_float(nn.Embedding(N, K, dtype=torch.float16), scheme).to(DEVICE)
    ids, graph = torch.tensor([3, 0, 207], device=DEVICE), torch.cuda.CUDAGraph()
    gc.collect()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = embedding(ids)
        graph.replay()
        assert_same(y, embedding(ids))
