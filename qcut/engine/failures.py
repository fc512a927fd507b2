"""Errors of requests, and errors after which the device computes no more."""

from __future__ import annotations

import traceback

import torch

from qcut.errors import DeviceError, QcutError, RequestError


def as_failure(error: BaseException) -> QcutError:
    """A failure as the error of a request. Panics of tokenizers and exits of listeners are no `Exception`."""
    # Frames of the failure would keep their tensors alive as long as the request, and memory may be what is short.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, QcutError):
        return error
    failure = RequestError(f"the request has failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def check_device(device: torch.device, error: BaseException) -> None:
    """Check whether a device still computes after an error.

    Raises:
        DeviceError: it does not, and will not in this process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, dtype=torch.uint8, device=device).item()
    except torch.OutOfMemoryError:
        return
    except Exception as lost:
        message = f"{device} computes no more in this process ({lost}); start it anew. It failed with: {error}"
        raise DeviceError(message) from error
