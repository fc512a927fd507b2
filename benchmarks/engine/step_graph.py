"""A CUDA graph with kernels that can be skipped, with the addresses among each kernel's arguments."""

from __future__ import annotations

import ctypes
import statistics
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

WORD = struct.Struct("@Q")
MOST_PARAMETERS = 256


class Node(NamedTuple):
    """A node of a graph.

    Attributes:
        handle: the driver's.
        name: of its kernel, or ``memset`` or ``memcpy``.
        words: the kernel's parameters, as words of 8 bytes, with addresses among them.
    """

    handle: Any
    name: str
    words: tuple[int, ...] = ()


class StepGraph:
    """A captured step.

    Args:
        run: queues the work; it runs once before it is captured.

    Attributes:
        nodes: in the order of their capture.

    Raises:
        RuntimeError: the driver's or torch's, with the call that failed.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        run()
        torch.cuda.synchronize()
        self._stream = torch.cuda.Stream()
        # The nodes live as long as the graph.
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._stream), torch.cuda.graph(self._graph, stream=self._stream):
            run()
        graph = driver.CUgraph(self._graph.raw_cuda_graph())
        _, count = self._call("cuGraphGetNodes", graph)
        found, _ = self._call("cuGraphGetNodes", graph, count)
        self.nodes = [self._node(handle) for handle in found[:count]]
        (self._executable,) = self._call("cuGraphInstantiate", graph, 0)

    def time_us(self, chosen: Collection[int], before: Callable[[], object], launches: int, rounds: int) -> float:
        """Microseconds of one launch with some nodes, by their index in `nodes`; the others do nothing.

        Args:
            chosen: the nodes that run.
            before: queues what each round starts with.
            launches: of a round, one behind the other.
            rounds: their median counts; one more runs first.
        """
        for index, node in enumerate(self.nodes):
            self._call("cuGraphNodeSetEnabled", self._executable, node.handle, int(index in chosen))
        stream = self._driver.CUstream(self._stream.cuda_stream)
        samples = []
        for _ in range(rounds + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(self._stream):
                before()
                start.record()
                for _ in range(launches):
                    self._call("cuGraphLaunch", self._executable, stream)
                end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / launches)
        return statistics.median(samples[1:])

    def _node(self, handle: Any) -> Node:
        (kind,) = self._call("cuGraphNodeGetType", handle)
        kinds = self._driver.CUgraphNodeType
        if kind != kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            return Node(handle, "memset" if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET else "memcpy")
        (params,) = self._call("cuGraphKernelNodeGetParams", handle)
        what, kernel = ("cuFunc", params.func) if int(params.func) else ("cuKernel", params.kern)
        (name,) = self._call(f"{what}GetName", kernel)
        return Node(handle, name.decode(), self._words(what, kernel, int(params.kernelParams or 0)))

    def _words(self, what: str, kernel: Any, arguments: int) -> tuple[int, ...]:
        words: list[int] = []
        describe = getattr(self._driver, f"{what}GetParamInfo")
        for index in range(MOST_PARAMETERS if arguments else 0):
            # The driver reveals the number of parameters by refusing the next one.
            error, _, size = describe(kernel, index)
            if error != self._driver.CUresult.CUDA_SUCCESS:
                break
            address = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[index]
            held = ctypes.string_at(address, size)
            words += (word for (word,) in WORD.iter_unpack(held[: size // WORD.size * WORD.size]))
        return tuple(words)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error!r}")
        return tuple(results)
