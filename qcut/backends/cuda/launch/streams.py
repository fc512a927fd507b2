"""CUDA streams: handles for launches, events that say when their work is done, and captures undisturbed by garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from qcut.errors import DeviceError
from qcut.jit.device import capture_id


def _no_stream(device: int) -> int:
    raise DeviceError("this build of torch has no CUDA")


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
"""Returns the current ``CUstream`` of a CUDA ordinal as an integer."""


def stream_state(device: torch.device) -> tuple[int, int] | None:
    """The current stream of the current CUDA device, and the number of the graph that captures it (0 for none).

    Returns None if ``device`` is not the current CUDA device.
    """
    if device.index != torch.cuda.current_device():
        return None
    stream = current_stream(device.index)
    return stream, capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """Record an event after all work that is queued on the device's current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


_COLLECTION = threading.Lock()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python's collector from running during a capture.

    What it finalizes (events and graphs of engines that are garbage) calls what CUDA refuses while this thread
    captures, and the capture would fail. One capture runs at a time.
    """
    with _COLLECTION:
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()
