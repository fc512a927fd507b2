"""Kernels as binaries, and the instructions in them, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from qcut import jit
from qcut.emitters.core.source import KernelSource
from qcut.errors import ToolchainError
from qcut.jit.toolchain import find_nvdisasm


def build(*sources: KernelSource) -> list[jit.Binary]:
    """With NVRTC, or with nvcc where NVRTC is not installed: the device text is the same."""
    if not jit.is_toolchain_available("nvrtc"):
        sources = tuple(replace(source, toolchain="nvcc") for source in sources)
    built = jit.build_many(sources, progress=False)
    for result in built.values():
        if isinstance(result, Exception):
            raise result
    return [result for result in built.values() if isinstance(result, jit.Binary)]


def in_turns(sources: Callable[[str], list[KernelSource]], arch: str) -> list[KernelSource]:
    """The share of sm_80, or of sm_90a, where each kernel is to be compiled for either of the two.

    Kernels take turns in their order. A kernel that exists on one of the two alone is in its share.

    Args:
        sources: kernels of an architecture.
        arch: sm_80 or sm_90a.
    """

    def by_common_name(other: str) -> dict[str, KernelSource]:
        return {source.name.replace(other.replace("_", ""), ""): source for source in sources(other)}

    mine, other = by_common_name(arch), by_common_name({"sm_80": "sm_90a", "sm_90a": "sm_80"}[arch])
    shared = [name for name in mine if name in other]
    turn = set(sorted(shared)[arch == "sm_90a" :: 2])
    return [source for name, source in mine.items() if name in turn or name not in other]


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)", re.MULTILINE)


@cache
def listing(cubin: bytes) -> tuple[str, ...]:
    """Instruction names, with their modifiers, of every kernel in a cubin, in the order they stand in memory."""
    try:
        tool = str(find_nvdisasm().path)
    except ToolchainError as error:
        pytest.skip(str(error))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Only code, without the analysis of data flow, which takes half the time.
        command = [tool, "-c", "-ndf", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(_INSTRUCTION.findall(text))


def instructions(cubin: bytes) -> set[str]:
    """The distinct ones of `listing`."""
    return set(listing(cubin))
