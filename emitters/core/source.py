"""The results of emitters: kernels as text with their parameters, and the element types of all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.errors import EmitError as EmitError

INCLUDE_DIR = Path(__file__).resolve().parents[1] / "include"
"""Root of qcut's device headers: text includes them as ``<qcut/name.cuh>``."""


class DType(Enum):
    """Element types, named as kernels name them."""

    S8 = "s8"
    E4M3 = "e4m3"
    U4 = "u4"
    S16 = "s16"
    S32 = "s32"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def bits(self) -> int:
        """Size of one element in bits."""
        return {"u4": 4, "s8": 8, "e4m3": 8, "s16": 16, "f16": 16, "bf16": 16, "s32": 32, "f32": 32}[self.value]

    @property
    def cpp(self) -> str:
        """C++ spelling in raw kernels (CUTLASS has its own)."""
        return {
            "s8": "int8_t",
            "e4m3": "qcut::E4M3",
            "u4": "qcut::Nibbles",
            "s16": "short",
            "s32": "int32_t",
            "f16": "__half",
            "bf16": "__nv_bfloat16",
            "f32": "float",
        }[self.value]


FLOATS = (DType.F16, DType.BF16, DType.F32)
"""Types of activations."""

ParamKind = Literal["ptr", "count", "i32", "i64", "f32"]
_FORMATS: dict[ParamKind, str] = {"ptr": "P", "count": "P", "i32": "i", "i64": "q", "f32": "f"}
_TYPES: dict[ParamKind, str] = {"count": "const int*", "i32": "int", "i64": "long long", "f32": "float"}


@dataclass(frozen=True)
class Param:
    """One kernel argument, in order. Packed with C's natural alignment.

    A ``count`` is the address of one int32 on the device, such as the number of tokens that a router sends to an
    expert. The count ``m_count`` belongs to the i32 parameter ``m``, which the host sets to an upper bound: the grid,
    the launch plan and a captured graph depend on the bound only, and CTAs past the count return at once.

    Attributes:
        name: in C++.
        kind: size and class of the packed argument.
        cpp: C++ type of a pointer; another parameter has that of its kind.

    Raises:
        EmitError: a pointer without a type, or with one that is no pointer.
    """

    name: str
    kind: ParamKind
    cpp: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "ptr") != self.cpp.endswith("*"):
            raise EmitError(f"parameter {self.name!r}: C++ type {self.cpp!r} does not suit kind {self.kind!r}")

    @property
    def fmt(self) -> str:
        """`struct` format character."""
        return _FORMATS[self.kind]

    @property
    def bound(self) -> str:
        """Name of the parameter that bounds a count on the host."""
        return self.name.removesuffix("_count")

    @property
    def declaration(self) -> str:
        """Type and name in C++."""
        return f"{self.cpp or _TYPES[self.kind]} {self.name}"


@dataclass(frozen=True)
class KernelSource:
    """One kernel as text, ready for a compiler.

    Attributes:
        name: the procedural name: unique per description; cache, logs and benchmarks use it.
        text: the device translation unit.
        entry: the ``extern "C"`` kernel symbol in the cubin.
        params: the arguments of the launch, in order. A raw kernel (``host_text is None``) takes
            exactly these; a CUTLASS kernel's host launcher takes a C struct of them.
        arch: real architecture, one of `qcut.emitters.core.arch.ARCHITECTURES`.
        toolchain: ``nvrtc`` needs no toolkit; ``nvcc`` needs nvcc (device) and g++ (host launcher).
        block: threads per CTA of a raw kernel (0 with a host launcher, which knows its own).
        smem_bytes: dynamic shared memory per CTA in bytes (0 with a host launcher).
        host_text: C++ of the host launcher, or None. Exports
            ``int qcut_launch(const void* args, void* function, void* stream, int flags)`` and
            ``long qcut_query(int what, const void* args)``.
        defines: extra ``-D`` options, without the dash.
        includes: include roots that the text needs: ``qcut``, ``cutlass``, ``cccl``.
        libraries: link options of the host launcher (never libcudart: the driver API is resolved
            by `qcut.jit`).
        waits: the kernel executes ``griddepcontrol.wait`` before it touches what the kernel before may write. Only
            such a kernel may be launched before its predecessor ends.
    """

    name: str
    text: str
    entry: str
    params: tuple[Param, ...]
    arch: str
    toolchain: Literal["nvrtc", "nvcc"] = "nvrtc"
    block: int = 0
    smem_bytes: int = 0
    host_text: str | None = None
    defines: tuple[str, ...] = ()
    includes: tuple[str, ...] = ("qcut",)
    libraries: tuple[str, ...] = field(default=())
    waits: bool = False

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise EmitError(f"{self.name}: architecture {self.arch!r} is not one of {ARCHITECTURES}")
        sizes = {p.name for p in self.params if p.kind == "i32"}
        for count in (p for p in self.params if p.kind == "count"):
            if count.bound not in sizes:
                raise EmitError(f"{self.name}: count {count.name!r} has no i32 parameter {count.bound!r}, its bound")

    @property
    def struct_format(self) -> str:
        """`struct` format of the argument block (native alignment)."""
        return "@" + "".join(p.fmt for p in self.params)


class DeferredSource(KernelSource):
    """A `KernelSource` that writes its texts when one of them is first read. Made by `deferred`.

    The name, which is unique for a description, and the emitters' files decide the texts. The cache finds a kernel by
    these two, without the packages that writing needs.
    """

    _write: Callable[[], tuple[str, str]]

    @property
    def is_described(self) -> bool:
        """Whether the name decides the texts: `dataclasses.replace` makes sources for which this is unknown."""
        return "_write" in self.__dict__

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value == "" and name in ("text", "host_text") and "_write" in self.__dict__:
            for field_name, written in zip(("text", "host_text"), self._write(), strict=True):
                object.__setattr__(self, field_name, written)
            value = super().__getattribute__(name)
        return value

    def __reduce__(self) -> tuple[type[KernelSource], tuple[object, ...]]:
        """Pickle the written texts without the function that writes them, for a process that builds the kernel."""
        return KernelSource, tuple(getattr(self, part.name) for part in fields(self))


def deferred(write: Callable[[], tuple[str, str]], **facts: Any) -> DeferredSource:
    """Return a source that gets its device text and host launcher from ``write``.

    Args:
        write: called when a text is first read; may raise `EmitError`.
        facts: the other fields of `KernelSource`.
    """
    source = DeferredSource(text="", host_text="", **facts)
    object.__setattr__(source, "_write", write)
    return source
