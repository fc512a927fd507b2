"""Python's side of libcuda.c, the stand-in for the driver."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any


def compile_c(text: str, output: Path, *options: str, libraries: tuple[str, ...] = ()) -> Path:
    command = ["g++", "-O1", "-shared", "-fPIC", *options, "-o", str(output), "-x", "c", "-", "-x", "none", *libraries]
    subprocess.run(command, input=text, text=True, check=True)
    return output


class Record(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("pdl", ctypes.c_int),
        ("args", ctypes.c_char * 512),
    ]


class Fake:
    """The stand-in driver's knobs and records."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.lib, f"fake_{name}").value

    def set(self, **values: int) -> None:
        for name, value in values.items():
            ctypes.c_int.in_dll(self.lib, f"fake_{name}").value = value

    def context(self, value: int) -> None:
        self.lib.fake_set_context(ctypes.c_uint64(value))

    def params(self, layout: list[tuple[int, int]]) -> None:
        self.set(param_count=len(layout))
        for i, (offset, size) in enumerate(layout):
            (ctypes.c_size_t * 32).in_dll(self.lib, "fake_param_offset")[i] = offset
            (ctypes.c_size_t * 32).in_dll(self.lib, "fake_param_size")[i] = size

    @property
    def last(self) -> Record:
        return Record.from_buffer_copy(Record.in_dll(self.lib, "fake_last"))

    def unpacked(self, fmt: str) -> tuple[Any, ...]:
        return struct.unpack_from(fmt, bytes(Record.in_dll(self.lib, "fake_last"))[Record.args.offset :])
