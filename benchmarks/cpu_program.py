"""`cpu_llama.cpp`: llama2.c's inference in plain C++ on the CPU, built here and run for one sequence."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from qcut.errors import BuildError, QcutError, ToolchainError

SOURCE = Path(__file__).with_name("cpu_llama.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp")


def build_cpp(folder: Path) -> Path:
    """Compile `SOURCE` for this machine.

    Raises:
        ToolchainError: there is no g++.
        BuildError: it fails; with its output.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise ToolchainError(f"{SOURCE.name}: there is no g++ in PATH; install it (Debian: apt-get install g++)")
    program = folder / SOURCE.stem
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{SOURCE.name}: g++ failed", command=" ".join(command), log=done.stderr)
    return program


def run_cpp(program: Path, file: Path, prompt: Sequence[int], new: int, threads: int) -> tuple[list[int], float]:
    """New tokens, and how many a second after the first.

    Raises:
        QcutError: the program refused the file or an id; what it said.
    """
    command = [str(program), str(file), str(new), *map(str, prompt)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    if done.returncode != 0:
        raise QcutError(f"{SOURCE.stem}: {done.stderr.strip()}")
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return [int(token) for token in lines["tokens"].split()], float(lines["tokens_s"])


def thread_counts() -> list[int]:
    """One, four, and all cores: small products may lose by more threads."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, min(4, cores), cores})


def cpu_name() -> str:
    """As /proc/cpuinfo has it, and how many cores may be used."""
    names = [line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
