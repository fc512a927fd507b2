"""The C++ operators on CPU tensors: callbacks stand in for the driver and for host launchers, and record launches."""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch

from qcut.backends.cuda import codebook, linear
from qcut.backends.cuda.launch import native as _native
from qcut.backends.cuda.launch.plans import LaunchPlan, LaunchSpec
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import KernelSource, Param
from qcut.ops.codebook import CodebookGemmOp, CodebookGemvOp, QuantizeRotatedOp, RotateTokensOp, W8A8RotatedLinearOp
from qcut.ops.linear import Int8LinearOp, Int16x8LinearOp, W8A8LinearOp, W8A8StaticLinearOp, W8A16LinearOp
from qcut.ops.registry import PURE

STREAM = 0x5500_1234_5678
BLOCK, SMEM = 384, 100_000
PYTHONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "w8a8_linear": (W8A8LinearOp, linear.w8a8_linear),
    "w8a8_static_linear": (W8A8StaticLinearOp, linear.w8a8_static_linear),
    "w8a16_linear": (W8A16LinearOp, linear.w8a16_linear),
    "int16x8_linear": (Int16x8LinearOp, linear.int16x8_linear),
    "rotate_tokens": (RotateTokensOp, codebook.rotate_tokens),
    "codebook_gemm": (CodebookGemmOp, codebook.codebook_gemm),
    "codebook_gemv": (CodebookGemvOp, codebook.codebook_gemv),
    "quantize_rotated": (QuantizeRotatedOp, codebook.quantize_rotated),
    "w8a8_rotated_linear": (W8A8RotatedLinearOp, linear.w8a8_rotated_linear),
    "int8_linear": (Int8LinearOp, linear.int8_linear),
    "int8_linear_pure": (Int8LinearOp, linear.int8_linear),
}
"""Of each operator, the class of its calls and the function that serves them on CUDA."""


class Record(NamedTuple):
    """One launch; a host launcher has no grid."""

    function: int
    grid: tuple[int, int, int] | None
    block: bytes
    stream: int
    pdl: bool


class Config(ctypes.Structure):
    _fields_ = [
        ("shape", ctypes.c_uint32 * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    ]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


def launch_plan(kernel: Any, grid: Grid, **options: Any) -> LaunchPlan:
    """The plan of a kernel that is not built; options as of `LaunchSpec`."""
    return LaunchPlan(kernel, LaunchSpec(KernelSource("any", "", "any", (), "sm_90a", waits=True), grid, **options))


def field_offsets(params: tuple[Param, ...]) -> list[tuple[int, int]]:
    """(offset, bytes) of each parameter as C lays them out."""
    ends = [struct.calcsize("@" + "".join(p.fmt for p in params[: i + 1])) for i in range(len(params))]
    return [(end - struct.calcsize(p.fmt), struct.calcsize(p.fmt)) for end, p in zip(ends, params, strict=True)]


@dataclass
class Driver:
    """Stands in for ``cuLaunchKernelEx``, host launchers and the current stream; records launches."""

    records: list[Record] = field(default_factory=list)
    params: dict[int, tuple[Param, ...]] = field(default_factory=dict)
    status: dict[int, int] = field(default_factory=dict)
    stream_status: int = 0

    def __post_init__(self) -> None:
        kernel = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        host = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
        self.callbacks = kernel(self._launch_kernel), host(self._launch_host), stream(self._current_stream)
        self.kernel, self.host, self.stream = (ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self.callbacks)

    def reset(self) -> None:
        self.records.clear()
        self.params.clear()
        self.status.clear()
        self.stream_status = 0

    def _launch_kernel(self, config: Any, function: int, addresses: Any, extra: int | None) -> int:
        c = config.contents
        x, y, z, *block, smem = c.shape
        assert (block, smem, extra) == ([BLOCK, 1, 1], SMEM, None)
        if c.attribute_count:
            attribute = Attribute.from_address(c.attributes)
            assert (c.attribute_count, attribute.id, attribute.value) == (1, 6, 1)
        offsets = field_offsets(self.params[function])
        data = bytearray(struct.calcsize("@" + "".join(p.fmt for p in self.params[function])))
        for i, (offset, size) in enumerate(offsets):
            data[offset : offset + size] = ctypes.string_at(addresses[i], size)
        self.records.append(Record(function, (x, y, z), bytes(data), c.stream or 0, bool(c.attribute_count)))
        return self.status.get(function, 0)

    def _launch_host(self, block: int, function: int, stream: int | None, flags: int) -> int:
        size = struct.calcsize("@" + "".join(p.fmt for p in self.params[function]))
        self.records.append(Record(function, None, ctypes.string_at(block, size), stream or 0, bool(flags & 1)))
        return self.status.get(function, 0)

    def _current_stream(self, device: int, stream: Any) -> int:
        assert device == -1
        stream[0] = STREAM
        return self.stream_status


class Kernel:
    """Stands in for `qcut.jit.Kernel`: packs as the real one does and records the launch."""

    name, block, smem_bytes = "fake", BLOCK, SMEM

    def __init__(self, driver: Driver, function: int, params: tuple[Param, ...], host: bool) -> None:
        self.driver, self.function, self.host_launcher = driver, function, driver.host if host else 0
        driver.params[function] = params
        self.format = struct.Struct("@" + "".join(p.fmt for p in params))

    def launch(self, grid: tuple[int, int, int], args: tuple[Any, ...], stream: int, pdl: bool) -> None:
        shape = None if self.host_launcher else grid
        self.driver.records.append(Record(self.function, shape, self.format.pack(*args), stream, pdl))


def decoded(record: Record, params: tuple[Param, ...]) -> dict[str, Any]:
    fmt = "@" + "".join(p.fmt for p in params)
    values = struct.unpack(fmt, record.block)
    assert struct.pack(fmt, *values) == record.block, "padding is zero"
    return dict(zip((p.name for p in params), values, strict=True))


@contextmanager
def registered(namespace: str, driver: Driver) -> Iterator[_native.Library]:
    """A library that serves CPU tensors under a namespace of its own, in front of Python's functions for CUDA."""
    loaded = _native.load()
    assert loaded is not None, "g++ and torch's headers are there: it must compile"
    definitions = defined(namespace, by_python)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.register(namespace, "cpu", driver.kernel, driver.stream)
    yield loaded
    definitions._destroy()


def defined(namespace: str, serves: Callable[[str], Callable[..., Any]]) -> torch.library.Library:
    """The operators in a namespace, on CPU tensors served by a function for each overload."""
    definitions = torch.library.Library(namespace, "DEF")
    for name, overload in (*product(_native.OPS, ("default", "early_read")), ("int8_linear_pure", "default")):
        qualified = name if overload == "default" else f"{name}.{overload}"
        definitions.define(str(getattr(getattr(torch.ops.qcut, name), overload)._schema).removeprefix("qcut::"))
        definitions.impl(qualified, serves(qualified), "CPU")
    return definitions


def by_python(op: str) -> Callable[..., Any]:
    """The operator as Python serves it on CUDA."""
    name, _, overload = op.partition(".")
    call, function = PYTHONS[name]
    early_read = bool(overload) or op.endswith(PURE)
    return lambda *args: function(call(*args, early_read=early_read))


class Setting:
    """The operators with stand-in kernels, and what became of their calls."""

    def __init__(self, driver: Driver, library: _native.Library) -> None:
        self.driver, self.library = driver, library

    def served(self, call: Callable[[], Any]) -> tuple[Any, list[Record], bool]:
        """Result, launches, and whether C++ served the call."""
        self.driver.records.clear()
        before = self.library.hits
        result = call()
        return result, list(self.driver.records), self.library.hits == before + 1
