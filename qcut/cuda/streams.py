"""CUDA streams as kernels are launched on them: by number, without an object of torch's."""

from __future__ import annotations

from collections.abc import Callable

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
