"""What ``QCUT_DUMP=FOLDER`` receives of a kernel: text, flags, PTX, SASS, and ptxas's report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qcut.common.files import make_directory, write_bytes
from qcut.common.locks import Lock
from qcut.emitters.core.source import KernelSource
from qcut.errors import ConfigError, QcutError
from qcut.jit import compilers, toolchain
from qcut.jit.scratch import scratch_folder

T = TypeVar("T")

_lock = Lock()
_dumped: set[tuple[str, str]] = set()


def dump(source: KernelSource, key: str, cubin: bytes, log: str) -> None:
    """Write what a kernel is made of to the folder, once in a process; without ``QCUT_DUMP``, nothing.

    The files are ``NAME.cu``, ``.flags``, ``.ptx``, ``.cubin``, ``.sass``, ``.log`` and, with a host launcher,
    ``.host.cpp``. If the tool for one of them is missing, the file holds the reason.

    Args:
        source: the kernel's text.
        key: its key in the cache.
        cubin: its device code.
        log: the compiler's report.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    folder = os.environ.get("QCUT_DUMP")
    if not folder:
        return
    with _lock:
        if (folder, key) in _dumped:
            return
        _dumped.add((folder, key))
    files = {
        "cu": source.text,
        "flags": f"{source.toolchain} -arch={source.arch} {' '.join(compilers.device_flags(source))}\n",
        "ptx": _or_reason(compilers.ptx, source),
        "cubin": cubin,
        "sass": _or_reason(disassemble, cubin),
        "log": f"{log}\n",
        "host.cpp": source.host_text,
    }
    try:
        make_directory(Path(folder))
        for suffix, content in files.items():
            if content is not None:
                data = content if isinstance(content, bytes) else content.encode()
                write_bytes(Path(folder) / f"{source.name}.{suffix}", [data])
    except OSError as error:
        raise ConfigError(f"QCUT_DUMP={folder}: cannot be written ({error.strerror or error})") from error


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, by nvdisasm.

    Raises:
        ToolchainError: there is no nvdisasm.
        BuildError: it failed.
    """
    tool = toolchain.find_nvdisasm()
    with scratch_folder() as folder:
        (folder / "kernel.cubin").write_bytes(cubin)
        return compilers.run_all([[str(tool.path), "-c", "kernel.cubin"]], folder)


def _or_reason(make: Callable[[T], str], argument: T) -> str:
    try:
        return f"{make(argument)}\n"
    except QcutError as error:
        return f"// {error}\n"
