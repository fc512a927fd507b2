"""Constants that are made while a CUDA graph is captured."""

from __future__ import annotations

import torch

from qcut.numerics.codebook.constants import outside_capture
from tests.gpu.support.oracles import DEVICE


def test_every_stream_of_the_pool_is_outside() -> None:
    """torch has 32 of them, and one is captured."""
    device, graph = torch.device(DEVICE, torch.cuda.current_device()), torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=device)
    with torch.cuda.graph(graph):
        for i in range(40):
            with outside_capture(device):
                made = torch.full((4,), float(i), device=device).cpu().tolist()
            assert made == [i] * 4
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1] * 4
