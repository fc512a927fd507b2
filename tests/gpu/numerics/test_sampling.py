"""Sampling on the GPU: the CPU's tokens and weights, and graphs that draw anew."""

from __future__ import annotations

import pytest
import torch

from qcut.numerics import sampling
from qcut.numerics.sampling import Sampling, sample
from tests.support.oracles import INF, NAN

GPU_OPTIONS = [Sampling(), Sampling(0.8, seed=1), Sampling(1.3, top_k=50, seed=2), Sampling(1.0, top_p=0.9, seed=3)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS)
@pytest.mark.parametrize("vocabulary", [1, 1000, 50257, 262_144])
def test_the_gpu_draws_the_same_tokens(gpu, vocabulary, options):
    logits = torch.randn(32, vocabulary) * 3
    logits[::3] = logits[::3].round()
    logits[1, ::2], logits[2, ::2], logits[3] = NAN, -INF, NAN
    sequence, position = torch.randint(0, 2**32, (2, 32))
    got = sample(logits.to(gpu), options, sequence.to(gpu), position.to(gpu))
    assert got.device == gpu
    assert got.tolist() == sample(logits, options, sequence, position).tolist()


@pytest.mark.gpu
def test_the_gpu_has_the_same_weights(gpu):
    d = -torch.linspace(0, 40, 1_000_001)
    assert torch.equal(sampling._weights(d.to(gpu)).cpu(), sampling._weights(d))


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS)
def test_a_graph_samples_what_its_inputs_hold_at_replay(gpu, options):
    logits, index = torch.zeros(4, 50257, device=gpu), torch.zeros(4, dtype=torch.int64, device=gpu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sample(logits, options, index, index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sample(logits, options, index, index)
    for _ in range(3):
        logits.copy_(torch.randn(4, 50257) * 3)
        index.copy_(torch.randint(0, 2**32, (4,)))
        got.fill_(-1)
        graph.replay()
        assert got.tolist() == sample(logits.cpu(), options, index.cpu(), index.cpu()).tolist()
