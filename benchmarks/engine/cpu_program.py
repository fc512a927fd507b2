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
        BuildError: g++ fails; the message has its output.
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
    """Return the new tokens, and the tokens per second after the first one.

    Raises:
        QcutError: the program refused the file or an id; the message has its output.
    """
    command = [str(program), str(file), str(new), *map(str, prompt)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    if done.returncode != 0:
        raise QcutError(f"{SOURCE.stem}: {done.stderr.strip()}")
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return [int(token) for token in lines["tokens"].split()], float(lines["tokens_s"])


def thread_counts() -> list[int]:
    """Return one, four, and the number of cores: more threads may slow small products down."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, min(4, cores), cores})


def cpu_name() -> str:
    """Return the CPU's name in /proc/cpuinfo and the number of usable cores."""
    names = [line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
