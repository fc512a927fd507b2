"""`qcut.Embedding` on CUDA: the rows of the CPU, inside a graph too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from tests.gpu.support.oracles import DEVICE

SCHEMES = (
    "w8a16",
    "codebook4",
    "codebook3_g64",
    "codebook2",
    "codebook4+4",
    "codebook4+2",
    "int4",
    "int4_g16",
    "codebook4_qr",
    "codebook4_pairs",
)


def tables(scheme: str, dtype: torch.dtype = torch.float32) -> tuple[Embedding, Embedding]:
    """One table on the CPU and on the GPU, 200 x 160: the last group is shorter."""
    cpu = Embedding.from_float(nn.Embedding(200, 160).to(dtype), scheme)
    gpu = Embedding.empty(200, 160, scheme, dtype)
    gpu.load_state_dict(cpu.state_dict())
    return cpu, gpu.to(DEVICE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_those_of_the_cpu(scheme: str) -> None:
    cpu, gpu = tables(scheme)
    ids = torch.randint(0, 200, (3, 50), generator=torch.Generator().manual_seed(0))
    found = gpu(ids.to(DEVICE)).cpu()
    if "qr" in scheme:
        # A row is a sum of 128 float32 products of values below 4.
        torch.testing.assert_close(found, cpu(ids), rtol=0, atol=128 * 4 * 2**-24)
    else:
        assert torch.equal(found, cpu(ids))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_graphs(scheme: str) -> None:
    _, gpu = tables(scheme, torch.float16)
    ids = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    gpu(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu(ids)
    for first in (0, 100, 184):
        ids.copy_(torch.arange(first, first + 16))
        graph.replay()
        assert torch.equal(out, gpu(ids.clone()))


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
def test_a_tied_table_moves_with_the_classifier(scheme: str) -> None:
    head = Linear.from_float(nn.Linear(160, 200, bias=False), scheme)
    model = nn.ModuleDict({"embed": Embedding.tied_to(head), "head": head})
    ids = torch.arange(200)
    expected = model["embed"](ids)
    before = torch.cuda.memory_allocated(DEVICE)
    model.to(DEVICE)
    # Buffers are rounded up to 512 bytes each.
    assert torch.cuda.memory_allocated(DEVICE) - before <= head.weight_bytes + 512 * len(list(head.buffers()))
    assert torch.equal(model["embed"](ids.to(DEVICE)).cpu(), expected)
