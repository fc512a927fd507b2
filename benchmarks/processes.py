"""Calls a function in processes on the CPU: small layers are fitted there sooner than by launches on a busy GPU."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any

import torch


class Processes:
    """A pool of processes, of one thread each, which start at once; with 0 of them, calls are made here.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if count:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(1,))
            for _ in range(count):
                self._pool.submit(int)

    def map(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results of calls, in their order. Arguments and results are copied: tensors of other devices are not taken.

        Args:
            function: of a module, so that a process finds it.
            calls: the arguments of each.
        """
        if self._pool is None:
            return [function(*arguments) for arguments in calls]
        futures = [self._pool.submit(_call, function, _packed(arguments)) for arguments in calls]
        return [_unpacked(future.result()) for future in futures]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _call(function: Callable[..., Any], arguments: bytes) -> bytes:
    return _packed(function(*_unpacked(arguments)))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
