"""Streams of torch, for code that queues work beside the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
