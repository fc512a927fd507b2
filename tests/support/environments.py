"""Environments of a process: other versions of packages, no compilers, a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from qcut import jit
from qcut.jit import toolchain
from tests.support import ROOT


def environment(folder: Path, wanted: Sequence[str], *options: str) -> Path:
    """Make an environment unless it is there; returns its Python.

    Args:
        folder: of the environment.
        wanted: requirements of packages that take precedence over those beneath.
        options: of ``pip install``.
    """
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        venv.create(folder, clear=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *options, *wanted]
        subprocess.run([python, *install], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def run_tests(python: Path, arguments: Sequence[str]) -> int:
    """Run pytest on all cores in an environment; returns its exit status. With ``--install``, nothing is run."""
    if "--install" in arguments:
        return 0
    below = Path(sysconfig.get_path("purelib"))
    settings = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins of the packages beneath need modules that are not found
        "LD_LIBRARY_PATH": str(below / "nvidia" / "cu13" / "lib"),  # NVRTC, which is looked for in one environment
    }
    options = ["-p", "xdist", "--numprocesses", "auto", "--quiet", "-p", "no:cacheprovider"]
    command = [str(python), "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False).returncode


PACKAGES = ("cutlass_cppgen", "cutlass_library", "cuda.core", "cuda.bindings", "cuda.pathfinder", "nvidia")
"""What brings compilers and their headers."""


def hide_compilers() -> None:
    """Take away nvcc, g++, NVRTC, the CUDA headers and nvidia-cutlass, for the rest of the process."""
    for name in list(sys.modules):
        if name.startswith(tuple(f"{package}." for package in PACKAGES)):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(PACKAGES))  # type: ignore[arg-type]  # None: a module that is known not to be there
    os.environ["PATH"] = ""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        os.environ.pop(name, None)
    toolchain.SYSTEM_CUDA = Path("/nowhere")
    toolchain.reset()
    for kind in ("nvrtc", "nvcc"):
        assert jit.missing_toolchain(kind) is not None, kind


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True
