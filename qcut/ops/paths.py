"""The back end that computes the operators of layers: CUDA, Triton or the reference; and which GPUs have which."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from qcut.common.locks import Lock
from qcut.errors import ConfigError, PathWarning, UnsupportedError

BACK_ENDS = ("cuda", "triton", "reference")
_OTHER_NAMES = {"fused": "cuda", "portable": "triton", "explicit": "reference"}


class _Path(threading.local):
    """A thread's execution path. Compiled code is guarded by the attribute; a ContextVar could not be traced."""

    def __init__(self) -> None:
        self.name = "cuda"


path = _Path()
_lock = Lock()
_chosen = 0  # running blocks of another back end than CUDA, in all threads
_watchers: list[Callable[[int], None]] = []
_refusals: dict[int, str] | None = None
_warned: set[int] = set()


@contextmanager
def execution_path(name: str) -> Iterator[None]:
    """Choose the back end of layers within a block, in the thread that runs it.

    Args:
        name: ``cuda``: qcut's CUDA kernels on GPUs that have them, plain torch on the CPU. ``triton``: Triton kernels
            on any GPU that Triton knows, which dequantize weights inside the product; on the CPU in Triton's
            interpreter, with TRITON_INTERPRET=1. ``reference``: plain torch everywhere: weights unpacked, looked up,
            multiplied and rescaled. Integers are the same on all three. ``fused``, ``portable`` and ``explicit`` are
            other names of the three.

    Raises:
        ConfigError: another name.
    """
    name = _OTHER_NAMES.get(name, name)
    if name not in BACK_ENDS:
        raise ConfigError(f"back end {name!r} does not exist; allowed: {', '.join(BACK_ENDS)}")
    before, path.name = path.name, name
    _count(name != "cuda")
    try:
        yield
    finally:
        path.name = before
        _count(-(name != "cuda"))


def watch(watcher: Callable[[int], None]) -> None:
    """Call a function now, and whenever it changes, with the number of running blocks of another back end than CUDA."""
    with _lock:
        _watchers.append(watcher)
        watcher(_chosen)


def _count(change: int) -> None:
    global _chosen
    if change:
        with _lock:
            _chosen += change
            for watcher in _watchers:
                watcher(_chosen)


def refusals() -> dict[int, str]:
    """By CUDA ordinal, why qcut's CUDA kernels do not run on a visible GPU; GPUs on which they do are left out."""
    global _refusals
    if _refusals is None:
        _refusals = {
            device: reason for device in range(torch.cuda.device_count()) if (reason := _refusal(device)) is not None
        }
    return _refusals


def _refusal(device: int) -> str | None:
    from qcut.dispatch.gpus import target_for  # where there is a GPU: the CPU needs nothing of the kernel side

    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return f"GPU {gpu.name} is AMD's; qcut's CUDA kernels run on NVIDIA's"
    try:
        target_for((gpu.major, gpu.minor), gpu.multi_processor_count, gpu.name)
    except UnsupportedError as error:
        return str(error)
    return None


def is_usual() -> bool:
    """Whether this thread computes with the CUDA back end, and every GPU has it."""
    return path.name == "cuda" and not (refusals() if _refusals is None else _refusals)


def path_on(device: torch.device) -> str:
    """The back end of this thread's calls on a CUDA device; warns once of a GPU that has Triton's only."""
    if path.name != "cuda":
        return path.name
    reason = refusals().get(device.index if device.index is not None else torch.cuda.current_device())
    if reason is None:
        return "cuda"
    ordinal = device.index or 0
    if ordinal not in _warned:
        _warned.add(ordinal)
        warnings.warn(f"{reason}. Layers run Triton's kernels there", PathWarning, stacklevel=2)
    return "triton"
