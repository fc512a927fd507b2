"""Loads binaries onto a device and launches them through the driver API.

`load` does all work that is done once; `Kernel.launch` packs the arguments into a buffer of the calling
thread and makes one foreign call. A launch neither allocates device memory nor synchronises, so a CUDA
graph can capture it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence

from qcut.common.locks import Lock
from qcut.emitters.core.source import KernelSource
from qcut.errors import LaunchError
from qcut.jit import debug, toolchain
from qcut.jit import device as _device
from qcut.jit.build import Binary, rebuild

FLAG_PDL = 1
"""Bit of ``qcut_launch``'s flags: let the kernel start before its predecessor ends."""

QUERY_SMEM_BYTES = 0
"""``qcut_query(0, NULL)``: dynamic shared memory per CTA in bytes."""

QUERY_PARAM_BYTES = 1
"""``qcut_query(1, NULL)``: size of the kernel's one parameter block in bytes, as the host compiler sees it."""

QUERY_WORKSPACE_BYTES = 2
"""``qcut_query(2, args)``: device memory in bytes that a launch with these arguments needs."""

QUERY_THREADS = 3
"""``qcut_query(3, NULL)``: threads per CTA."""

QUERY_CAN_IMPLEMENT = 4
"""``qcut_query(4, args)``: whether the kernel takes a problem of these sizes and alignments."""

_FUNCTION_MAX_DYNAMIC_SMEM = 8
_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_INVALID_IMAGE = 200
_WRONG_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_PACKING_ERRORS = (struct.error, TypeError, ValueError, OverflowError, ctypes.ArgumentError)

# CUlaunchConfig: grid, block, shared memory, stream, attributes, their number.
_CONFIG = struct.Struct("@IIIIIIIPPI")
# CUlaunchAttribute: id, padding to 8, then a union of 64 bytes; one int of it is used.
_ATTRIBUTE = struct.Struct("@ixxxxi60x")

_kernels: dict[tuple[str, int], Kernel] = {}
_hosts: dict[str, ctypes.CDLL] = {}
_lock = Lock()


def load(binary: Binary, source: KernelSource, device: int) -> Kernel:
    """Load a kernel onto a device, once per process.

    A stored binary that does not load is compiled again, once.

    Args:
        binary: the binary that `build` made of the source.
        source: states the kernel's parameters, block and shared memory.
        device: CUDA ordinal.

    Returns:
        The kernel; the same object for the same binary and device.

    Raises:
        DeviceError: there is no driver or no such device.
        LaunchError: the driver refuses the code, the kernel needs more shared memory than the device
            has, or its parameters are not those of the source.
        BuildError: the stored binary does not load, and compiling it again fails.
    """
    if (kernel := _kernels.get((binary.key, device))) is not None:
        return kernel
    with _lock:
        if (kernel := _kernels.get((binary.key, device))) is None:
            context = _device.primary_context(device)
            with _device.using(context), _device.capture_tolerated():
                try:
                    kernel = Kernel(binary, source, device)
                except _UnusableBinaryError:
                    kernel = Kernel(rebuild(source), source, device)
            _kernels[binary.key, device] = kernel
    return kernel


class _UnusableBinaryError(LaunchError):
    """Code does not load. One rebuild is worth a try, since a cache may come from another machine."""


class _Buffers(threading.local):
    """One thread's argument block and launch configuration, with the references ctypes passes on.

    Attributes:
        all: (argument block, configuration, reference to the block, reference to the array of argument
            addresses, reference to the configuration, address of the attribute).
    """

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        args = ctypes.create_string_buffer(max(size, 1))
        base = ctypes.addressof(args)
        pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        config = ctypes.create_string_buffer(_CONFIG.size)
        self.attribute = ctypes.create_string_buffer(
            _ATTRIBUTE.pack(_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1), _ATTRIBUTE.size
        )
        self.all = (
            args,
            config,
            ctypes.byref(args),
            ctypes.byref(pointers),
            ctypes.byref(config),
            ctypes.addressof(self.attribute),
        )


class Kernel:
    """One kernel on one device, ready to launch. Made by `load`; threads may share it.

    Attributes:
        name: procedural name.
        device: CUDA ordinal.
        block: threads per CTA.
        smem_bytes: dynamic shared memory per CTA in bytes.
        resources: registers and memory as ptxas reported them, or None.
    """

    def __init__(self, binary: Binary, source: KernelSource, device: int) -> None:
        lib = toolchain.driver()
        self.name, self.device, self.resources = binary.name, device, binary.resources
        self.block, self.smem_bytes = source.block, source.smem_bytes
        self._params = source.params
        self._context = _device.primary_context(device)
        self._host = _load_host(binary) if binary.host_so is not None else None
        fields, offsets = struct.Struct(source.struct_format), param_offsets(source)
        self._buffers = _Buffers(fields.size, offsets)
        self._pack = fields.pack_into
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        if status := lib.cuModuleLoadData(ctypes.byref(module), binary.cubin):
            kind = _UnusableBinaryError if status == _INVALID_IMAGE else LaunchError
            raise kind(self._message(f"{binary.arch} code does not load", status))
        self._check(lib.cuModuleGetFunction(ctypes.byref(function), module, binary.entry.encode()), "no such entry")
        self._function = function
        if self._host is not None:
            self.block, self.smem_bytes = self.query(QUERY_THREADS), self.query(QUERY_SMEM_BYTES)
        if self.smem_bytes:
            status = lib.cuFuncSetAttribute(function, _FUNCTION_MAX_DYNAMIC_SMEM, self.smem_bytes)
            self._check(status, f"cannot have {self.smem_bytes} bytes of shared memory per CTA")
        if hasattr(lib, "cuFuncLoad"):  # CUDA 12.4; else the first launch loads it, perhaps in a graph capture
            self._check(lib.cuFuncLoad(function), "does not load")
        if hasattr(lib, "cuFuncGetParamInfo"):  # CUDA 12.4
            self._check_signature(lib, offsets)
        self._call = lib.cuLaunchKernelEx if self._host is None else self._host.qcut_launch
        if debug.is_logged("launch"):
            self.launch = self._logged_launch  # type: ignore[method-assign]

    def _logged_launch(
        self, grid: tuple[int, int, int], args: Sequence[int | float], stream: int, pdl: bool = False
    ) -> None:
        sizes = ", ".join(f"{p.name}={value}" for p, value in zip(self._params, args, strict=False) if p.fmt != "P")
        dependent = ", early" if pdl else ""
        debug.log("launch", f"{self.name} on {grid} x {self.block}, stream {stream:#x}{dependent}: {sizes}")
        type(self).launch(self, grid, args, stream, pdl)

    def launch(self, grid: tuple[int, int, int], args: Sequence[int | float], stream: int, pdl: bool = False) -> None:
        """Queue the kernel on a stream of its device.

        Args:
            grid: CTAs in x, y, z. A host launcher ignores this argument and computes its own grid.
            args: one number per parameter of the source, in order: addresses, sizes, float32 scalars.
            stream: ``CUstream`` as an integer; 0 is the legacy default stream.
            pdl: programmatic dependent launch: the kernel may start before its predecessor on the
                stream ends, and waits for it by itself (``griddepcontrol.wait``).

        Raises:
            LaunchError: the arguments do not fit the parameters, or the driver refuses the launch. An
                error of an earlier kernel surfaces here too: launches are asynchronous.
        """
        block, config, block_ref, pointers_ref, config_ref, attribute = self._buffers.all
        try:
            self._pack(block, 0, *args)
            if self._host is not None:
                status = self._call(block_ref, self._function, ctypes.c_void_p(stream), FLAG_PDL if pdl else 0)
            else:
                x, y, z = grid
                attributes, count = (attribute, 1) if pdl else (0, 0)
                _pack_config(config, 0, x, y, z, self.block, 1, 1, self.smem_bytes, stream, attributes, count)
                status = self._call(config_ref, self._function, pointers_ref, None)
        except _PACKING_ERRORS as error:
            raise self._bad_arguments(args, grid, stream, error) from error
        if status:
            if self._host is not None:
                flags = FLAG_PDL if pdl else 0
                self._recover(status, lambda: self._call(block_ref, self._function, ctypes.c_void_p(stream), flags))
            else:
                self._recover(status, lambda: self._call(config_ref, self._function, pointers_ref, None), grid)

    @property
    def function(self) -> int:
        """``CUfunction`` as an integer."""
        return self._function.value or 0

    @property
    def host_launcher(self) -> int:
        """Address of ``qcut_launch``; 0 for a raw kernel."""
        return 0 if self._host is None else ctypes.cast(self._host.qcut_launch, ctypes.c_void_p).value or 0

    def query(self, what: int, args: Sequence[int | float] | None = None) -> int:
        """Ask the host launcher a question (``qcut_query``).

        Args:
            what: one of the ``QUERY_*`` codes, or a code that the launcher's emitter defines.
            args: numbers as for `launch`, for questions that depend on the problem.

        Raises:
            LaunchError: the kernel has no host launcher, or the arguments do not fit.
        """
        if self._host is None:
            raise LaunchError(f"kernel {self.name}: a raw kernel has no host launcher to query")
        if args is None:
            return int(self._host.qcut_query(what, None))
        block, _, block_ref, *_ = self._buffers.all
        try:
            self._pack(block, 0, *args)
        except _PACKING_ERRORS as error:
            raise self._bad_arguments(args, None, 0, error) from error
        return int(self._host.qcut_query(what, block_ref))

    def _recover(self, status: int, again: Callable[[], int], grid: tuple[int, int, int] | None = None) -> None:
        """Launch again under the kernel's own context if that was not the current one; otherwise raise."""
        if status in _WRONG_CONTEXT and _device.current_context() != self._context:
            with _device.using(self._context):
                status = again()
        if status:
            shape = "" if grid is None else f"grid {tuple(grid)}, "
            what = f"launch failed ({shape}block {self.block}, {self.smem_bytes} bytes of shared memory)"
            raise LaunchError(self._message(what, status))

    def _bad_arguments(
        self, args: Sequence[int | float], grid: tuple[int, int, int] | None, stream: int, error: Exception
    ) -> LaunchError:
        expected = ", ".join(f"{p.name}:{p.kind}" for p in self._params)
        return LaunchError(
            f"kernel {self.name}: arguments {args}, grid {grid}, stream {stream}: {error}; parameters are ({expected})"
        )

    def _check_signature(self, lib: ctypes.CDLL, offsets: Sequence[int]) -> None:
        """Compare the kernel's parameters with the packed arguments: a mismatch would corrupt memory."""
        actual: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        queried = ctypes.byref(offset), ctypes.byref(size)
        while lib.cuFuncGetParamInfo(self._function, ctypes.c_size_t(len(actual)), *queried) == 0:
            actual.append((offset.value, size.value))
        if self._host is None:
            packed = [(o, struct.calcsize(p.fmt)) for o, p in zip(offsets, self._params, strict=True)]
        else:
            # An over-aligned block may start past the bank's first byte: the driver places it.
            packed = [(actual[0][0] if actual else 0, self.query(QUERY_PARAM_BYTES))]
        if actual != packed:
            raise LaunchError(
                f"kernel {self.name}: its parameters lie at (offset, bytes) {actual}, a launch would pack {packed}"
            )

    def _check(self, status: int, what: str) -> None:
        if status:
            raise LaunchError(self._message(what, status))

    def _message(self, what: str, status: int) -> str:
        return f"kernel {self.name}: {what} on {_device.device(self.device)}: {_device.explain(status)}"


_pack_config = _CONFIG.pack_into


def param_offsets(source: KernelSource) -> list[int]:
    """Byte offset of each parameter in the argument block, under C's natural alignment."""
    return [
        struct.calcsize("@" + "".join(p.fmt for p in source.params[: i + 1])) - struct.calcsize(source.params[i].fmt)
        for i in range(len(source.params))
    ]


def _load_host(binary: Binary) -> ctypes.CDLL:
    """Load a host launcher into this process, once; its driver symbols resolve against libcuda."""
    if (host := _hosts.get(binary.key)) is not None:
        return host
    toolchain.driver()
    try:
        assert binary.host_so is not None
        host = load_shared(binary.name, binary.host_so)
        host.qcut_launch.restype, host.qcut_query.restype = ctypes.c_int, ctypes.c_long
    except (OSError, AttributeError) as error:
        raise _UnusableBinaryError(f"kernel {binary.name}: its host launcher does not load: {error}") from error
    _hosts[binary.key] = host
    return host


def load_shared(name: str, code: bytes) -> ctypes.CDLL:
    """Load a shared object from memory, so that neither a full disk nor a noexec mount can stop the load.

    Args:
        name: the name that debuggers and profilers show.
        code: contents of the ELF file.

    Raises:
        OSError: the loader refuses it.
    """
    # The descriptor stays open: the loader knows libraries by path, and a descriptor number used again would name
    # another library.
    fd = os.memfd_create(name[:200], os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{fd}")
    except OSError:
        os.close(fd)
        raise
