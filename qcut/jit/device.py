"""Driver calls other than launches: devices, contexts, capture of graphs, error texts."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from qcut.common.locks import once
from qcut.errors import DeviceError
from qcut.jit import toolchain

_ATTRIBUTES = {"sm_count": 16, "cc_major": 75, "cc_minor": 76}
_RATES = {"clock_khz": 13, "memory_khz": 36, "bus_bits": 37, "l2_bytes": 38}
_CAPTURE_MODE_RELAXED = 2
_CAPTURE_ACTIVE = 1


@dataclass(frozen=True)
class Device:
    """One GPU as the driver describes it.

    Attributes:
        ordinal: CUDA ordinal, counting visible devices.
        name: marketing name.
        cc: compute capability (major, minor).
        sm_count: multiprocessors.
        memory_bytes: total device memory.
    """

    ordinal: int
    name: str
    cc: tuple[int, int]
    sm_count: int
    memory_bytes: int

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.name}, sm_{self.cc[0]}{self.cc[1]})"


def devices() -> list[Device]:
    """List the visible GPUs, without making a context on any.

    Raises:
        DeviceError: there is no driver, or it cannot start.
    """
    lib, count = _initialised(), ctypes.c_int()
    _check(lib.cuDeviceGetCount(ctypes.byref(count)), "counting devices")
    return [device(ordinal) for ordinal in range(count.value)]


@once
def device(ordinal: int) -> Device:
    """Describe one GPU.

    Args:
        ordinal: CUDA ordinal.

    Raises:
        DeviceError: there is no such device, or no driver.
    """
    lib, handle = _initialised(), ctypes.c_int()
    _check(lib.cuDeviceGet(ctypes.byref(handle), ordinal), f"device {ordinal}")
    name, memory, value = ctypes.create_string_buffer(128), ctypes.c_size_t(), ctypes.c_int()
    _check(lib.cuDeviceGetName(name, len(name), handle), f"device {ordinal}: name")
    _check(lib.cuDeviceTotalMem_v2(ctypes.byref(memory), handle), f"device {ordinal}: memory")
    values = {}
    for key, code in _ATTRIBUTES.items():
        _check(lib.cuDeviceGetAttribute(ctypes.byref(value), code, handle), f"device {ordinal}: {key}")
        values[key] = value.value
    cc = (values["cc_major"], values["cc_minor"])
    return Device(ordinal, name.value.decode(errors="replace"), cc, values["sm_count"], memory.value)


def rates(ordinal: int) -> dict[str, int]:
    """What the driver states of a GPU's speed, 0 for a number that it does not state.

    Args:
        ordinal: CUDA ordinal.

    Returns:
        ``clock_khz``, the highest clock of the multiprocessors; ``memory_khz``, the memory's (two transfers a cycle);
        ``bus_bits``, width of the memory's bus; ``l2_bytes``.

    Raises:
        DeviceError: there is no such device, or no driver.
    """
    lib, handle, value = _initialised(), ctypes.c_int(), ctypes.c_int()
    _check(lib.cuDeviceGet(ctypes.byref(handle), ordinal), f"device {ordinal}")
    found = {}
    for key, code in _RATES.items():
        stated = lib.cuDeviceGetAttribute(ctypes.byref(value), code, handle) == 0
        found[key] = max(0, value.value) if stated else 0
    return found


def driver_version() -> str:
    """Return the newest CUDA version that the driver supports.

    Raises:
        DeviceError: there is no driver.
    """
    version = ctypes.c_int()
    _check(toolchain.driver().cuDriverGetVersion(ctypes.byref(version)), "driver version")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


@once
def primary_context(ordinal: int) -> int:
    """Retain the primary context of a device, which PyTorch uses too, until the process ends.

    Raises:
        DeviceError: there is no such device, or its context cannot be made.
    """
    lib, handle, context = _initialised(), ctypes.c_int(), ctypes.c_void_p()
    _check(lib.cuDeviceGet(ctypes.byref(handle), ordinal), f"device {ordinal}")
    _check(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"device {ordinal}: primary context")
    return context.value or 0


def current_context() -> int:
    """Return the calling thread's context, 0 if it has none."""
    context = ctypes.c_void_p()
    _check(toolchain.driver().cuCtxGetCurrent(ctypes.byref(context)), "current context")
    return context.value or 0


@contextlib.contextmanager
def using(context: int) -> Iterator[None]:
    """Make a context current in this thread for the duration of a block."""
    lib = toolchain.driver()
    _check(lib.cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "making a context current")
    try:
        yield
    finally:
        lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@contextlib.contextmanager
def capture_tolerated() -> Iterator[None]:
    """Let this thread load code while a CUDA graph is being captured; loading is no part of the graph."""
    lib, mode = toolchain.driver(), ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _check(lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "stream capture mode")
    try:
        yield
    finally:
        lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def capture_id(stream: int) -> int:
    """Return the number of the graph that a stream is being captured into; 0 for a stream that is not captured.

    Raises:
        DeviceError: the driver does not know the stream.
    """
    status, number = ctypes.c_int(), ctypes.c_uint64()
    result = toolchain.driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    _check(result, "stream capture")
    return number.value if status.value == _CAPTURE_ACTIVE else 0


def explain(status: int) -> str:
    """Return a ``CUresult`` in words."""
    lib, name, text = toolchain.driver(), ctypes.c_char_p(), ctypes.c_char_p()
    if lib.cuGetErrorName(status, ctypes.byref(name)) or lib.cuGetErrorString(status, ctypes.byref(text)):
        return f"error {status}"
    return f"{(name.value or b'').decode()} ({status}): {(text.value or b'').decode()}"


@once
def _initialised() -> ctypes.CDLL:
    lib = toolchain.driver()
    _check(lib.cuInit(0), "starting the CUDA driver")
    return lib


def _check(status: int, what: str) -> None:
    if status:
        raise DeviceError(f"{what}: {explain(status)}")
