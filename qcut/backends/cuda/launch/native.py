"""The linear operators' hot path in C++ (the folder ``cpp``): compiled once per torch, cached, loaded.

The C++ code serves calls whose plan `Library.insert` has given it, and leaves every other call to Python, which serves
all calls if there is no g++ or torch came without its headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch

from qcut.common.locks import Lock, once
from qcut.errors import BuildError, DeviceError, QcutError, ToolchainError
from qcut.jit import background, debug, toolchain
from qcut.jit import cache as disk
from qcut.jit.compilers import read_output, run_all
from qcut.jit.launch import load_shared
from qcut.jit.scratch import scratch_folder
from qcut.jit.waiting import build_mode
from qcut.ops import paths

SOURCE = Path(__file__).parent / "cpp" / "operators.cpp"
LINEAR_OPS = ("w8a8_linear", "w8a8_static_linear", "w8a16_linear", "int16x8_linear")
"""The operators of int8 layers."""
OPS = (
    *LINEAR_OPS,
    *("rotate_tokens", "codebook_gemm", "codebook_gemv", "quantize_rotated", "int8_linear", "w8a8_rotated_linear"),
)
"""The operators, in the order of ``Op`` in ``launch.h``; ``int8_linear`` has a `qcut.ops.registry.PURE` form too."""
FLAGS = (
    "aligned",
    "early_read",
    "bias",
    "residual",
    "row_norm",
    "offsets",
    "pairs",
    "fold",
    "e4m3",
    "unit_scales",
    "mirrored",
)
"""The flags of a key, in the order of ``Flags`` in ``launch.h``."""

_NAME = "qcut_linear_ops"
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden")
_LIBRARIES = ("-lc10", "-ltorch_cpu")
_SCALAR_TYPES = {torch.int8: 1, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # c10::ScalarType
_ENVIRONMENT = ("CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX")


class Key(ctypes.Structure):
    """``Key`` of the source: a call at one bucket of rows."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "k", "rows")),
        ("name", ctypes.c_char * 16),
        *((name, ctypes.c_int32) for name in ("op", "dtype", "out", "device", "flags", "passes", "bits", "slots")),
    ]


class Launch(ctypes.Structure):
    """``Launch`` of the source: a kernel and the arguments of its launch that are the same for every call."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("grid_rows", "grid_x", "grid_y", "grid_z", "grid_most")),
        *((name, ctypes.c_int32) for name in ("block", "smem_bytes", "pdl")),
        ("tail_count", ctypes.c_int32),
        ("tail", ctypes.c_int32 * 5),
    ]


class Plan(ctypes.Structure):
    """``Plan`` of the source: the launches of a call in order, one or two."""

    _fields_ = [
        ("launches", Launch * 2),
        ("count", ctypes.c_int32),
        ("row_multiple", ctypes.c_int32),
        ("k_padded", ctypes.c_int64),
    ]


def key(
    op: str,
    *,
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    name: str,
    device: int,
    out: torch.dtype | None = None,
    passes: int = 0,
    bits: int = 0,
    slots: int = 0,
    **flags: bool,
) -> Key:
    """Key of an operator's call at one bucket of rows.

    Args:
        op: one of `OPS`.
        n: number of output channels; of a rotation the columns of a group.
        k: columns of the tokens; of a codebook's product the units along K.
        rows: number of tokens, a `qcut.dispatch.buckets.m_bucket`.
        dtype: dtype of the tokens; of int8 ones that of the result.
        name: activation, or kind of the rotation.
        device: CUDA ordinal.
        out: dtype of the result, if the operator takes one.
        passes: of a rotation.
        bits: of an index.
        slots: group scales of a unit; of a rotated int8 token the columns of a group.
        flags: those of `FLAGS` that the operator has.
    """
    codes = OPS.index(op), _SCALAR_TYPES[dtype], 0 if out is None else _SCALAR_TYPES[out], device
    bitmask = sum(given << FLAGS.index(flag) for flag, given in flags.items())
    return Key(n, k, rows, name.encode(), *codes, bitmask, passes, bits, slots)


class Library:
    """The loaded C++ code, a copy of its own per instance; threads may share it.

    Attributes:
        skip_launch: address of a host launcher that launches nothing.
    """

    def __init__(self, code: bytes) -> None:
        lib = load_shared(_NAME, code)
        self._register = lib.qcut_register
        self._register.restype = ctypes.c_char_p
        self._register.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
        lib.qcut_insert.restype = lib.qcut_clear.restype = lib.qcut_chosen.restype = None
        lib.qcut_clear.argtypes, lib.qcut_chosen.argtypes = (ctypes.c_int32,), (ctypes.c_int64,)
        lib.qcut_hits.restype = ctypes.c_uint64
        lib.qcut_bucket.restype, lib.qcut_bucket.argtypes = ctypes.c_int64, (ctypes.c_int64,)
        self._lib = lib
        self.skip_launch = _address(lib.qcut_skip_launch)

    def register(self, namespace: str, device: str, launch_kernel: int, current_stream: int) -> None:
        """Put the C++ operators in front of Python's, for the rest of the process. Once per library.

        Args:
            namespace: has each of `OPS`, served by Python.
            device: type of the tensors that C++ serves.
            launch_kernel: address of ``cuLaunchKernelEx``.
            current_stream: address of ``aoti_torch_get_current_cuda_stream``.

        Raises:
            QcutError: torch's dispatcher refuses.
        """
        if error := self._register(namespace.encode(), device.encode(), launch_kernel, current_stream):
            raise QcutError(f"torch's dispatcher refuses the operators: {error.decode(errors='replace')}")

    def insert(self, key: Key, plan: Plan) -> None:
        """Serve the calls of this key from now on."""
        self._lib.qcut_insert(ctypes.byref(key), ctypes.byref(plan))

    def clear(self, *ops: str) -> None:
        """Forget the plans of operators."""
        for op in ops:
            self._lib.qcut_clear(OPS.index(op))

    def leave_to_python(self, blocks: int) -> None:
        """Serve no calls while any block chooses another execution path than the fused."""
        self._lib.qcut_chosen(blocks)

    @property
    def hits(self) -> int:
        """Calls served."""
        return int(self._lib.qcut_hits())

    def bucket(self, m: int) -> int:
        """The source's version of `qcut.dispatch.buckets.m_bucket`."""
        return int(self._lib.qcut_bucket(m))


_lock = Lock()
_library: Library | None = None
_settled = False
_kept: bytes | None = None  # from the background: the cache may not be writable


def library(*, wait: bool = True) -> Library | None:
    """The library, registered for ``torch.ops.qcut`` on CUDA; None if there is none, or not yet.

    Args:
        wait: compile the library here if it is not in the cache. False compiles it in the background, unless
            ``QCUT_BUILD`` says to wait.
    """
    global _library, _settled
    if not _settled:
        with _lock:
            if not _settled:
                if wait or not comes_later():
                    _library = _activate()
                elif background.builder.later(job(), first=True):
                    return None
                _settled = True
    return _library


def comes_later() -> bool:
    """Whether Python serves for now, because the library is not compiled and callers do not wait for g++."""
    return build_mode() != "wait" and _kept is None and problem() is None and _stored(fingerprint()) is None


def job() -> background.Job:
    """The compilation, for the background."""
    return background.Job(fingerprint(), "the C++ code of the linear operators", compiled, (), _keep)


def _keep(code: bytes) -> None:
    global _kept
    _kept = code


def clear(*ops: str) -> None:
    """Forget the library's plans of operators, if it is loaded."""
    if _library is not None:
        _library.clear(*ops)


def _activate() -> Library | None:
    try:
        launch_kernel, current_stream = _address(toolchain.driver().cuLaunchKernelEx), _address(_current_stream())
    except (DeviceError, OSError, AttributeError):  # no driver, or a torch without CUDA
        return None
    if (loaded := load()) is not None:
        try:
            loaded.register("qcut", "cuda", launch_kernel, current_stream)
        except QcutError as error:
            _warn(f"cannot be used: {error}")
            return None
        paths.watch(loaded.leave_to_python)
    return loaded


def load() -> Library | None:
    """Load a new copy of the library, compiled unless cached; None if it cannot be built or loaded."""
    if (code := build()) is None:
        return None
    try:
        return Library(code)
    except (OSError, AttributeError):  # a cache may come from another machine
        disk.discard(_NAME, fingerprint())
        build.cache_clear()
    try:
        return Library(code) if (code := build()) is not None else None
    except (OSError, AttributeError) as error:
        _warn(f"does not load: {error}")
        return None


@once
def build() -> bytes | None:
    """The shared object, from disk or from g++; None without g++, with ``QCUT_DEBUG=launch``, or if g++ fails."""
    if debug.is_logged("launch"):  # C++ would launch without a line
        return None
    if _kept is not None:
        return _kept
    if problem() is not None:
        return None
    try:
        return compiled()
    except BuildError as error:
        _warn(f"does not compile: {error}")
        return None


def compiled() -> bytes:
    """The shared object, from disk or from g++.

    Raises:
        BuildError: g++ fails.
    """
    digest = fingerprint()
    with disk.locked(digest):
        if (code := _stored(digest)) is None:
            code = _compile()
            disk.write(_NAME, digest, disk.Entry({}, {"so": code}))
    return code


def _stored(digest: str) -> bytes | None:
    if (entry := disk.read(_NAME, digest)) is None:
        return None
    if (code := entry.blobs.get("so")) is None:
        disk.refuse(_NAME, digest, "holds no shared object")
    return code


def problem() -> str | None:
    """The reason why the C++ code cannot be compiled here, in words; None if no reason is known."""
    try:
        toolchain.find_gxx()
    except ToolchainError as error:
        return str(error)
    header = _torch() / "include" / "torch" / "library.h"
    return None if header.is_file() else f"torch came without its headers ({header})"


def fingerprint() -> str:
    """Digest of everything the shared object depends on: source, torch, compiler, flags, machine, environment."""
    facts = [
        disk.SCHEMA,
        [path.read_text(encoding="utf-8") for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))],
        [torch.__version__, torch.version.git_version],
        [toolchain.find_gxx().version, *_flags(), *_LIBRARIES],
        [platform.machine(), *platform.libc_ver()],
        [(name, os.environ[name]) for name in _ENVIRONMENT if name in os.environ],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _flags() -> list[str]:
    return [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def _compile() -> bytes:
    root = _torch()
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    command = [str(toolchain.find_gxx().path), *_flags(), *include, "-o", f"{_NAME}.so", str(SOURCE)]
    command += [f"-L{root / 'lib'}", *_LIBRARIES]
    with scratch_folder() as folder:
        run_all([command], folder)
        return read_output(folder / f"{_NAME}.so", command)


def _torch() -> Path:
    return Path(torch.__file__).parent


def _current_stream() -> Any:
    # Part of torch's stable C interface; the library is loaded already.
    return ctypes.CDLL(str(_torch() / "lib" / "libtorch_cuda.so")).aoti_torch_get_current_cuda_stream


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _warn(what: str) -> None:
    warnings.warn(
        f"qcut: the C++ code of the linear operators {what}\nPython serves them, at more CPU time a call",
        RuntimeWarning,
        stacklevel=2,
    )
