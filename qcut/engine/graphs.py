"""CUDA graphs of an engine, captured once for each size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")

MAX_GRAPHS = 128
"""Most sizes whose graphs an engine keeps. A graph takes memory on the host and the device, its kernels' results do
not: all graphs write them to the same memory."""


class Graphs:
    """What an engine has captured, by size: steps and chunks of prompts.

    The graphs share one pool of memory and one stream, so that the results of the largest bound the memory of all: no
    two run at a time, and nobody reads what one has left in the pool after the next. The graphs that have not been used
    for longest are dropped.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._made: OrderedDict[Hashable, object] = OrderedDict()
        self._generation = _generation()

    @property
    def count(self) -> int:
        """Number of sizes."""
        return len(self._made)

    def refresh(self) -> None:
        """Drop all graphs if kernels have been chosen anew since: graphs launch the kernels of their time."""
        if self._generation != _generation():
            self._made.clear()
            self._pool, self._generation = None, _generation()

    def get(self, size: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` has made for a size, now or before. It holds its graph, and is of one type for each size."""
        made = self._made.get(size)
        if made is None:
            with torch.inference_mode(False), torch.no_grad():  # its tensors are written in other modes, too
                made = make()
            while len(self._made) >= MAX_GRAPHS:
                self._made.popitem(last=False)
            self._made[size] = made
        self._made.move_to_end(size)
        return cast(T, made)

    def run_and_capture(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> torch.cuda.CUDAGraph:
        """Do some work, and capture it in a graph.

        Args:
            run: queues the work. It runs before it is captured, so that kernels are built and loaded and memory that
                outlives a call is allocated; twice where kernels are missing, which are built together.
            before: runs in place of ``run`` before it is captured, where more than its kernels are to be ready.

        Raises:
            RuntimeError: torch's, where ``run`` cannot be captured.
        """
        from qcut.backends.cuda.launch.plans import recapturing
        from qcut.jit.waiting import dry_run_first

        dry_run_first(before or run)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # Where a capture fails, torch takes no other into its pool, and its own context leaves the stream current.
        with torch.cuda.stream(stream), capture, recapturing():
            run()
        self._pool = pool
        return graph


def _generation() -> int:
    from qcut.backends.cuda.launch.plans import generation

    return generation()
