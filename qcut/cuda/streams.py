"""CUDA streams: by number, as kernels are launched on them, and as torch has them for work beside the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from qcut.errors import DeviceError
from qcut.jit.device import capture_id


def _no_stream(device: int) -> int:
    raise DeviceError("this build of torch has no CUDA")


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
"""The current ``CUstream`` of a CUDA ordinal."""


def stream_state(device: torch.device) -> tuple[int, int] | None:
    """The current stream of the current CUDA device, and which graph it is being captured into (0 for none).

    None on another device than the current one.
    """
    if device.index != torch.cuda.current_device():
        return None
    stream = current_stream(device.index)
    return stream, capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A new stream that is the current one inside: it waits for the stream outside, which then waits for it."""
    outside, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield stream
    outside.wait_stream(stream)


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """An event behind all that is queued on the device's current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
