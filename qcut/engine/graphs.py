"""CUDA graphs, captured once for each size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")

MAX_GRAPHS = 128
"""Most graphs that are kept, one for each size. A graph takes memory on the host and the device; results share one
pool."""


class Graphs:
    """Graphs of a runner by size, of decode steps and prefill chunks.

    The graphs share one memory pool and one stream: no two run at a time, no result in the pool is read after the next
    replay, and the results of the largest graph bound the memory of all. The least recently used graphs are dropped.

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
        """Drop all graphs if kernels have been chosen anew since: graphs launch the earlier ones."""
        if self._generation != _generation():
            self._made.clear()
            self._pool, self._generation = None, _generation()

    def get(self, size: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make`` for a size, now or earlier. It holds its graph, and has one type for each size."""
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
        """Run some work, and capture it in a graph.

        Args:
            run: queues the work. It runs before it is captured, so that kernels are built and loaded and lasting memory
                is allocated; twice if kernels are missing, which are built together.
            before: runs in place of ``run`` before the capture, to build and load further kernels.

        Raises:
            RuntimeError: torch's, if ``run`` cannot be captured.
        """
        from qcut.backends.cuda.launch.plans import recapturing
        from qcut.backends.cuda.launch.streams import collection_paused
        from qcut.jit.waiting import dry_run_first

        dry_run_first(before or run)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # Where a capture fails, torch takes no other into its pool, and its own context leaves the stream current.
        with collection_paused(), torch.cuda.stream(stream), capture, recapturing():
            run()
        self._pool = pool
        return graph


def _generation() -> int:
    from qcut.backends.cuda.launch.plans import generation

    return generation()
