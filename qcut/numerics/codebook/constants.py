"""Constants that kernels read, made on a device whatever the caller's stream does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_capture(device: torch.device) -> Iterator[None]:
    """Let a block compute on a device at once, also while a CUDA graph is captured.

    A graph that is being captured only records work, and refuses copies from the host. Under a capture the block runs
    on a stream of its own and is waited for, so that what it makes is there before the graph's first replay. Outside of
    a capture, on the CPU and with HIP the block runs as it is.

    Args:
        device: where the block computes.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_current_stream_capturing():
        yield
        return
    from qcut.jit.device import capture_tolerated

    with capture_tolerated():
        stream = _stream_outside(device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _stream_outside(device: torch.device) -> torch.cuda.Stream:
    """A stream that is no part of a capture: torch hands out its few streams in turn, also one that is captured."""
    while True:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
