"""Runs the compilers: NVRTC (``cuda.core.Program``) or nvcc for device text, g++ for a host launcher."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcut.common.locks import Section
from qcut.emitters.core.source import INCLUDE_DIR, KernelSource
from qcut.errors import BuildError, ToolchainError
from qcut.jit import debug, toolchain
from qcut.jit.scratch import environment, scratch_folder, unsafe_character

_INCLUDE_ROOTS = ("qcut", "cutlass", "cuda", "cccl")
_ELF = b"\x7fELF"

_nvrtc = Section()  # NVRTC has locks of its own


@dataclass(frozen=True)
class Resources:
    """Registers and memory of a kernel, as ptxas reports them.

    Attributes:
        registers: registers per thread.
        smem_bytes: static shared memory per CTA.
        stack_bytes: local memory per thread; more than 0 deserves a look.
        spill_store_bytes: bytes that a thread stores to local memory, short of registers.
        spill_load_bytes: bytes that a thread loads from local memory, short of registers.
    """

    registers: int
    smem_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def compile_text(source: KernelSource, *, device: bool = True) -> tuple[bytes, bytes | None, str]:
    """Compile both texts of a kernel.

    Args:
        source: text, target and toolchain.
        device: False compiles only the host launcher; the cubin is then empty.

    Returns:
        The cubin, the host launcher's shared object (None for a raw kernel), and the compilers' output.

    Raises:
        BuildError: a compiler failed; carries its command and log.
        ToolchainError: a compiler or its headers are missing.
    """
    if source.toolchain == "nvcc":
        return _compile_nvcc(source, device)
    if source.host_text is not None:
        raise BuildError("a host launcher needs toolchain 'nvcc'", kernel=source.name)
    cubin, log = _compile_nvrtc(source)
    return cubin, None, log


def ptx(source: KernelSource) -> str:
    """The PTX that a kernel's cubin is made of.

    Raises:
        BuildError, ToolchainError: as `compile_text`.
    """
    if source.toolchain == "nvrtc":
        return _nvrtc_ptx(source)
    with scratch_folder(source.name) as folder:
        (folder / "device.cu").write_text(source.text, encoding="utf-8")
        command = ["-ptx" if word == "-cubin" else word for word in _nvcc_command(source)]
        run_all([[*command, "-o", "device.ptx", "device.cu"]], folder, source.name)
        return (folder / "device.ptx").read_text(errors="replace")


def device_flags(source: KernelSource) -> list[str]:
    """Options of the device compiler, without paths. Contraction is off: every operation of an epilogue rounds once."""
    flags = ["-std=c++17", "--fmad=false", "-DNDEBUG", *(f"-D{define}" for define in source.defines)]
    if debug.has_line_numbers():
        flags.append("-lineinfo")
    if source.toolchain == "nvcc":
        number = source.arch.removeprefix("sm_")
        flags += ["-O3", "-cubin", f"-gencode=arch=compute_{number},code={source.arch}", "--expt-relaxed-constexpr"]
    return flags


def host_flags(source: KernelSource) -> list[str]:
    """Options of the host compiler, without paths.

    Driver symbols stay undefined: libcuda is loaded before the launcher is. GNU unique symbols would tie
    the launchers' template statics together across shared objects. g++ reads CUTLASS's device code only for its types,
    so errors that ``-fpermissive`` allows, and all warnings, are off.
    """
    defines = ["-DNDEBUG", *(f"-D{define}" for define in source.defines)]
    return [
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-fno-gnu-unique",
        "-fpermissive",
        "-w",
        *defines,
        *source.libraries,
    ]


def headers(source: KernelSource) -> list[toolchain.Headers]:
    """Find the header sets that a source needs besides qcut's own headers.

    Raises:
        BuildError: the source names an include root that does not exist.
        ToolchainError: headers are missing.
    """
    if unknown := set(source.includes) - set(_INCLUDE_ROOTS):
        raise BuildError(f"unknown include roots {sorted(unknown)}; known: {_INCLUDE_ROOTS}", kernel=source.name)
    folders = [toolchain.find_nvcc_headers() if source.toolchain == "nvcc" else toolchain.find_cuda_include()]
    if "cutlass" in source.includes:
        folders.append(toolchain.find_cutlass_include())
    return folders


def _include_paths(source: KernelSource) -> list[str]:
    # CUTLASS before CUDA: its own cute/ and cutlass/ must win over a toolkit that ships a copy.
    paths = [INCLUDE_DIR, *(path for package in reversed(headers(source)) for path in package.paths)]
    return [str(path) for path in paths]


def _compile_nvrtc(source: KernelSource) -> tuple[bytes, str]:
    toolchain.find_nvrtc()
    program, options = toolchain.program_class()
    log = io.StringIO()
    include = _include_paths(source)
    command = shlex.join(["nvrtc", *device_flags(source), f"-arch={source.arch}", *(f"-I{path}" for path in include)])
    try:
        settings = options(
            name=f"{source.name}.cu",
            arch=source.arch,
            std="c++17",
            fma=False,
            include_path=include,
            define_macro=["NDEBUG", *source.defines],
            ptxas_options=["-v"],
            lineinfo=debug.has_line_numbers() or None,
        )
        with _nvrtc:
            code = program(source.text, "c++", settings).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core's exception classes moved between versions
        text = f"{log.getvalue()}\n{error}".replace("\0", "").strip()
        raise BuildError("NVRTC failed", kernel=source.name, command=command, log=text) from error
    return bytes(code), log.getvalue().replace("\0", "").strip()


def _nvrtc_ptx(source: KernelSource) -> str:
    """By NVRTC itself: cuda.core asks the driver about PTX, and a machine that builds may have none."""
    toolchain.find_nvrtc()
    from cuda.bindings import nvrtc

    virtual = f"--gpu-architecture=compute_{source.arch.removeprefix('sm_')}"
    flags = [*device_flags(source), virtual, *(f"-I{path}" for path in _include_paths(source))]
    with _nvrtc:
        _, program = nvrtc.nvrtcCreateProgram(source.text.encode(), f"{source.name}.cu".encode(), 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        _, size = nvrtc.nvrtcGetPTXSize(program)
        text = b" " * size
        nvrtc.nvrtcGetPTX(program, text)
        nvrtc.nvrtcDestroyProgram(program)
    if int(status):
        raise BuildError("NVRTC failed", kernel=source.name, command=shlex.join(["nvrtc", *flags]), log=str(status))
    return text.rstrip(b"\0 ").decode(errors="replace")


def _nvcc_command(source: KernelSource) -> list[str]:
    """nvcc with its flags, without input and output.

    Raises:
        ToolchainError: a tool is missing, or its path is not safe for the shell that nvcc runs.
    """
    nvcc, gxx = toolchain.find_nvcc(), toolchain.find_gxx()
    paths = _include_paths(source)
    for path in (str(gxx.path), *paths):
        if (character := unsafe_character(path)) is not None:
            raise ToolchainError(
                f"the path {path!r} has the character {character!r}, on which the shell that nvcc runs would act; "
                "install it under another path",
                kernel=source.name,
            )
    include = [f"-I{path}" for path in paths]
    return [str(nvcc.path), *device_flags(source), "-Xptxas=-v", "-ccbin", str(gxx.path), *include]


def _compile_nvcc(source: KernelSource, device: bool) -> tuple[bytes, bytes | None, str]:
    command = _nvcc_command(source)
    with scratch_folder(source.name) as folder:
        commands = []
        if device:
            (folder / "device.cu").write_text(source.text, encoding="utf-8")
            commands.append([*command, "-o", "device.cubin", "device.cu"])
        if source.host_text is not None:
            (folder / "host.cpp").write_text(source.host_text, encoding="utf-8")
            include = [word for word in command if word.startswith("-I")]
            gxx = str(toolchain.find_gxx().path)
            commands.append([gxx, *include, "-o", "host.so", "host.cpp", *host_flags(source)])
        log = run_all(commands, folder, source.name)
        cubin = read_output(folder / "device.cubin", commands[0], source.name) if device else b""
        host_so = read_output(folder / "host.so", commands[-1], source.name) if source.host_text is not None else None
        return cubin, host_so, log


def run_all(commands: Sequence[Sequence[str]], folder: Path, name: str | None = None) -> str:
    """Run compilers side by side in a scratch folder.

    Args:
        commands: programs with their arguments.
        folder: see `qcut.jit.scratch.scratch_folder`.
        name: kernel to name in errors.

    Returns:
        What they printed.

    Raises:
        BuildError: one of them failed; the others are killed.
        ToolchainError: one of them cannot be started.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            # In memory: on a full disk the compiler's message about it would be lost.
            output = stack.enter_context(os.fdopen(os.memfd_create("qcut-log", os.MFD_CLOEXEC), "w+b"))
            try:
                process = subprocess.Popen(
                    command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment()
                )
            except OSError as error:
                problem = f"{command[0]} cannot be started: {error.strerror or error}"
                raise ToolchainError(problem, kernel=name, command=shlex.join(command)) from error
            stack.callback(_stop, process)
            running.append((process, command, output))
        log = ""
        for process, command, output in running:
            process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
            if process.returncode != 0:
                how = f"ended with {process.returncode}"
                if process.returncode < 0:
                    how = f"was killed by signal {-process.returncode}"
                raise BuildError(f"{Path(command[0]).name} {how}", kernel=name, command=shlex.join(command), log=text)
            log += text + "\n"
    return log.strip()


def read_output(path: Path, command: Sequence[str], name: str | None = None) -> bytes:
    """Read the ELF file that a compiler wrote.

    Raises:
        BuildError: the compiler ended well, and left no file or something else.
    """
    code = path.read_bytes() if path.is_file() else b""
    if not code.startswith(_ELF):
        problem = f"{Path(command[0]).name} ended well and left no code in {path.name} ({len(code)} bytes)"
        raise BuildError(problem, kernel=name, command=shlex.join(command))
    return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def parse_resources(log: str, entry: str) -> Resources | None:
    """Read ptxas's report on one kernel.

    Args:
        log: compiler output under ``-Xptxas -v``.
        entry: kernel symbol.

    Returns:
        The figures, or None if the log holds no complete report on that kernel.
    """
    start = log.find(f"Compiling entry function '{entry}'")
    if start < 0:
        return None
    section = log[start:].split("Compiling entry function", 2)[1]

    def number(pattern: str) -> int | None:
        match = re.search(pattern, section)
        return int(match.group(1)) if match else None

    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame")
    stores, loads = number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads")
    if registers is None or stack is None or stores is None or loads is None:
        return None
    return Resources(registers, number(r"(\d+) bytes smem") or 0, stack, stores, loads)
