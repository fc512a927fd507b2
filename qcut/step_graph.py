"""One decoding step as a CUDA graph: launches cost the CPU more than one token's arithmetic costs the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
_WARM_UPS = 2
"""Runs before the capture: kernels are built and loaded, and memory that outlives a step is allocated."""


class StepGraph:
    """A step of a fixed number of sequences, captured once and replayed on other values.

    Args:
        step: logits of tokens (int64), positions and slots (int32), all ``[size]``; captured as it is now: weights
            that move later are still read where they were.
        size: of the step.
        spare: slot that sequences beyond those given write to.
        device: a CUDA device.
        pool: memory that graphs of one engine share, see ``torch.cuda.graph_pool_handle``.

    Raises:
        RuntimeError: torch's, where the step cannot be captured. Nothing is left behind.
    """

    def __init__(self, step: Step, size: int, spare: int, device: torch.device, pool: Any) -> None:
        self._spare = spare
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int32, device=device)
        self._slots = torch.full((size,), spare, dtype=torch.int32, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step(self._tokens, self._positions, self._slots)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream):
                self._logits = step(self._tokens, self._positions, self._slots)
        torch.cuda.current_stream(device).wait_stream(stream)

    def run(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Logits ``[n, vocabulary]`` of n sequences, at most ``size``, in memory that the next run overwrites."""
        n = len(tokens)
        self._tokens[:n].copy_(tokens)
        self._positions[:n].copy_(positions)
        self._slots[:n].copy_(slots)
        self._slots[n:].fill_(self._spare)
        self._graph.replay()
        return self._logits[:n]
