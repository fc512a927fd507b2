"""Finds compilers, headers and the driver: PyPI packages first, then ``CUDA_HOME``, then ``PATH``.

Nothing is searched, loaded or run at import. Every ``find_*`` function remembers its result for the life of
the process, searches once for all threads, and raises `ToolchainError` with what to install if nothing is
found.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from qcut.common.locks import imports_once, once
from qcut.errors import DeviceError, ToolchainError
from qcut.jit.scratch import environment, scratch_folder, unsafe_character

LIBCUDA = "libcuda.so.1"
SYSTEM_CUDA = Path("/usr/local/cuda")
TOOLKIT = "'cuda-toolkit[cccl,crt,cudart,nvcc,nvrtc,nvvm]>=13.0,<14'"
"""What to install: compilers and headers of one CUDA release, that of an installed torch if it has one."""

# Each wheel brings one of these headers; only all of them together make an include path that compiles.
_CUDA_HEADERS = {
    "cuda_fp16.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
    "nv/target": "nvidia-cuda-cccl",
}
_PROBE_TIMEOUT_S = 60


@dataclass(frozen=True)
class Tool:
    """A program or library that was found.

    Attributes:
        name: ``nvrtc``, ``nvcc`` or ``g++``.
        path: the executable or shared library.
        version: version as precise as the tool reports it; part of the cache key.
        root: the CUDA installation that the tool belongs to, or None.
    """

    name: str
    path: Path
    version: str
    root: Path | None = None


@dataclass(frozen=True)
class Headers:
    """A set of headers: its include directories in search order, and its version."""

    name: str
    paths: tuple[Path, ...]
    version: str


@imports_once
def find_nvrtc() -> Tool:
    """Load NVRTC, the compiler of raw kernels.

    Returns:
        The library and its version.

    Raises:
        ToolchainError: NVRTC, cuda-core or its bindings are not installed.
    """
    advice = f"pip install {TOOLKIT} 'cuda-python>=13,<14' cuda-core"
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = load_nvidia_dynamic_lib("nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
        program_class()
    except Exception as error:  # each package and version of it has its own exception for "not found"
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ModuleNotFoundError):
            advice = "pip install 'cuda-python>=13,<14' cuda-core"
        raise ToolchainError(f"NVRTC cannot be loaded ({what}); raw kernels need it: {advice}") from error
    path = Path(library.abs_path or "libnvrtc.so").resolve()
    return Tool("nvrtc", path, _nvrtc_patch_version(path, f"{major}.{minor}"))


@imports_once
def program_class() -> tuple[type, type]:
    """Return ``Program`` and ``ProgramOptions`` of whichever cuda-core is installed (0.3 to 1.x)."""
    from cuda import core

    if not hasattr(core, "Program") and importlib.util.find_spec("cuda.core.experimental"):
        from cuda.core import experimental as core
    return core.Program, core.ProgramOptions


@once
def find_gxx() -> Tool:
    """Find the host compiler: ``$CXX`` if it is a g++, then ``g++``.

    Returns:
        The program and its version.

    Raises:
        ToolchainError: there is no g++, or it does not run.
    """
    tried = []
    for name in (os.environ.get("CXX", ""), "g++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        output, problem = _run([path, "--version"])
        numbers = re.findall(r"\d+\.\d+\.\d+", output.partition("\n")[0])
        if numbers and "Free Software Foundation" in output and not problem:
            return Tool("g++", Path(path), numbers[-1])
        tried.append(f"{path} is no working g++" + (f": {problem}" if problem else ""))
    rejected = f" ({'; '.join(tried)})" if tried else ""
    raise ToolchainError(
        f"no g++{rejected}; CUTLASS kernels and the C++ operators need it: apt-get install g++, or set CXX"
    )


@once
def find_nvcc() -> Tool:
    """Find nvcc in the PyPI packages, ``$CUDA_HOME``, ``$CUDA_PATH``, ``PATH`` or ``/usr/local/cuda``, in this order.

    Returns:
        The program, its full version and its installation root.

    Raises:
        ToolchainError: there is no nvcc, or its installation is incomplete.
        BuildError: there is no scratch space to run nvcc in.
    """
    try:
        host = ["-ccbin", str(find_gxx().path)]
    except ToolchainError:
        host = []
    problems = []
    on_path = shutil.which("nvcc")
    candidates = [root / "bin" / "nvcc" for root in (*_pypi_roots(), *_env_roots())]
    candidates += [Path(on_path)] if on_path else []
    candidates.append(SYSTEM_CUDA / "bin" / "nvcc")
    for path in candidates:
        if not os.access(path, os.X_OK):
            continue
        if (character := unsafe_character(path)) is not None:
            problems.append(f"{str(path)!r} has the character {character!r}, on which the shell beneath nvcc would act")
            continue
        version, problem = _run([str(path), "--version"])
        # PATH may hold a wrapper script: nvcc itself knows its path.
        with scratch_folder() as folder:
            plan, wrong = _run([str(path), "--dryrun", *host, "-x", "cu", "-cubin", os.devnull], folder)
        release = re.search(r"release \S+ V(\S+)", version)
        top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
        # Without a g++, nvcc ends before it prints its path.
        home = top.group(1).strip() if top else "" if host else path.resolve().parents[1]
        if not release or not home:
            reason = problem or wrong
            problems.append(f"{path} does not run" + (f": {reason}" if reason else ""))
            continue
        root = Path(home).resolve()
        if not (root / "nvvm" / "bin" / "cicc").exists():
            problems.append(f"{path} has no cicc: pip install nvidia-nvvm=={release.group(1)}")
            continue
        return Tool("nvcc", path, release.group(1), root)
    tried = f" ({'; '.join(problems)})" if problems else ""
    raise ToolchainError(f"no working nvcc{tried}; CUTLASS kernels need it: pip install {TOOLKIT}, or set CUDA_HOME")


@once
def find_nvdisasm() -> Tool:
    """Find nvdisasm in the PyPI packages, ``$CUDA_HOME``, ``$CUDA_PATH``, ``PATH`` or ``/usr/local/cuda``.

    Raises:
        ToolchainError: there is none.
    """
    on_path = shutil.which("nvdisasm")
    candidates = [root / "bin" / "nvdisasm" for root in (*_pypi_roots(), *_env_roots(), SYSTEM_CUDA)]
    for path in [*candidates, *([Path(on_path)] if on_path else [])]:
        if os.access(path, os.X_OK):
            return Tool("nvdisasm", path, "")
    raise ToolchainError("no nvdisasm; SASS needs it: pip install nvidia-cuda-nvdisasm, or set CUDA_HOME")


@once
def find_cuda_include(root: Path | None = None) -> Headers:
    """Find the CUDA headers, libcu++ included.

    Args:
        root: installation to prefer (nvcc's own, so that host and device agree on every struct).

    Returns:
        Include directories and the runtime's version. One complete installation wins over a mixture.

    Raises:
        ToolchainError: a header is missing; the message names its package.
    """
    roots = [*([root] if root else []), *_pypi_roots(), *_env_roots()]
    on_path = shutil.which("nvcc")
    roots += [Path(on_path).resolve().parents[1]] if on_path else []
    roots.append(SYSTEM_CUDA)
    choices = [_include_dirs(r) for r in roots]
    mixture = tuple(dict.fromkeys(folder for dirs in choices for folder in dirs))
    for dirs in (*choices, mixture):
        if not _missing_headers(dirs):
            return Headers("CUDA headers", dirs, _header_version(dirs, "cuda_runtime_api.h", "CUDART_VERSION"))
    missing = _missing_headers(mixture)
    packages = ", ".join(f"{h} (of {_CUDA_HEADERS[h]})" for h in missing)
    raise ToolchainError(f"CUDA headers not found: {packages}; pip install {TOOLKIT}, or set CUDA_HOME")


def find_nvcc_headers() -> Headers:
    """Find the CUDA headers for nvcc, of its own release: libcu++ refuses any other.

    Returns:
        As `find_cuda_include`.

    Raises:
        ToolchainError: nvcc or a header is missing, or their releases differ.
    """
    nvcc = find_nvcc()
    found = find_cuda_include(nvcc.root)
    release = ".".join(nvcc.version.split(".")[:2])
    if found.version not in (release, "unknown"):
        raise ToolchainError(
            f"{nvcc.path} is of CUDA {release}, the headers in {found.paths[0]} are of {found.version}; allowed: one "
            f"release: pip install {TOOLKIT.split('>')[0]}=={found.version}.*'"
        )
    return found


@imports_once
def find_cutlass_include() -> Headers:
    """Find the CUTLASS headers that nvidia-cutlass carries.

    Returns:
        Include directories and CUTLASS's version.

    Raises:
        ToolchainError: nvidia-cutlass is not installed.
    """
    spec = importlib.util.find_spec("cutlass_library")
    for base in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(base) / "source"
        version_h = source / "include" / "cutlass" / "version.h"
        if version_h.is_file():
            digits = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", version_h.read_text())
            return Headers("CUTLASS", (source / "include", source / "tools" / "util" / "include"), ".".join(digits))
    raise ToolchainError("CUTLASS headers not found: pip install nvidia-cutlass==4.2.0.0")


@imports_once
def driver() -> ctypes.CDLL:
    """Load the CUDA driver library, with its symbols visible to host launchers.

    Returns:
        The library; nothing is initialised.

    Raises:
        DeviceError: there is no NVIDIA driver on this machine.
    """
    try:
        return ctypes.CDLL(LIBCUDA, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver ({error}): CUDA kernels can be built here but not run") from error


def reset() -> None:
    """Forget everything found, so that the next ``find_*`` searches again."""
    for find in (
        find_nvrtc,
        program_class,
        find_gxx,
        find_nvcc,
        find_cuda_include,
        find_cutlass_include,
        driver,
        _pypi_roots,
    ):
        find.cache_clear()


@once
def _pypi_roots() -> tuple[Path, ...]:
    """Roots of the ``nvidia`` wheels: ``nvidia/cu13`` shared by all, or one per package before CUDA 13."""
    spec = importlib.util.find_spec("nvidia")
    bases = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    return tuple(child for base in bases if base.is_dir() for child in sorted(base.iterdir()) if child.is_dir())


def _env_roots() -> list[Path]:
    return [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]


def _include_dirs(root: Path) -> tuple[Path, ...]:
    # From CUDA 13 on libcu++ lies one level down, and only nvcc adds that level by itself.
    return tuple(d for d in (root / "include", root / "include" / "cccl") if d.is_dir())


def _missing_headers(dirs: tuple[Path, ...]) -> list[str]:
    return [header for header in _CUDA_HEADERS if not any((d / header).is_file() for d in dirs)]


def _header_version(dirs: tuple[Path, ...], header: str, macro: str) -> str:
    for path in (d / header for d in dirs if (d / header).is_file()):
        if match := re.search(rf"^#define\s+{macro}\s+(\d+)", path.read_text(errors="replace"), re.MULTILINE):
            number = int(match.group(1))
            return f"{number // 1000}.{number % 1000 // 10}"
    return "unknown"


def _nvrtc_patch_version(path: Path, version: str) -> str:
    """Add the patch level: NVRTC itself reports ``13.0``, the toolkit's file name or the wheel knows the rest."""
    if match := re.search(r"\.so\.(\d+\.\d+\.\d+)$", path.name):
        return match.group(1)
    for package in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{version.split('.')[0]}"):
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if installed.startswith(version):
            return installed
    return version


def _run(command: list[str], folder: Path | None = None) -> tuple[str, str]:
    """Run a short command, in a scratch folder if it needs one.

    Returns:
        What it printed, both streams together, and why it failed; empty if it did not.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment() if folder else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except OSError as error:
        return "", error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PROBE_TIMEOUT_S} s"
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:]
        return done.stdout, ": ".join([f"it ended with {done.returncode}", *last])
    return done.stdout, ""
