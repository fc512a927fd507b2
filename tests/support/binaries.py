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

    Kernels take turns in their order. A kernel that exists only on one of the two is in its share.

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
def text(cubin: bytes) -> str:
    """The instructions of every kernel in a cubin, as ``nvdisasm`` writes them."""
    try:
        tool = str(find_nvdisasm().path)
    except ToolchainError as error:
        pytest.skip(str(error))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Only code, without the analysis of data flow, which takes half the time.
        command = [tool, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def listing(cubin: bytes) -> tuple[str, ...]:
    """Instruction names, with their modifiers, of every kernel in a cubin, in the order they stand in memory."""
    return tuple(_INSTRUCTION.findall(text(cubin)))


def instructions(cubin: bytes) -> set[str]:
    """The distinct ones of `listing`."""
    return set(listing(cubin))


_LINE = re.compile(_INSTRUCTION.pattern + r"\s*(.*?)\s*;|^(\.L\w+):", re.MULTILINE)
_ASYNC = re.compile(r"R\d+, R(\d+)(?:\.reuse)?, gdesc")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_WIDTHS = {".64": 2, ".WIDE": 2, ".128": 4}


def overwritten_operands(code: str) -> set[str]:
    """Instructions that write a register which an asynchronous product (``wgmma``) in flight may still read.

    Each loop of a kernel that has such products is read twice in a row, without its inner branches. No compiler reports
    this: a register operand belongs to the product until ``wgmma.wait_group``.

    Args:
        code: of `text`.
    """
    lines = [(found[1], found[2], found[3]) for found in _LINE.finditer(code)]
    labels = {label: at for at, (_, _, label) in enumerate(lines) if label}
    loops = set()
    for at, (name, operands, _) in enumerate(lines):
        target = _TARGET.search(operands or "")
        if name == "BRA" and target and (start := labels.get(target[1], at)) < at:
            loops.add((start, at))
    found: set[str] = set()
    for start, end in loops:
        body = lines[start : end + 1]
        if any(name and _ASYNC.match(operands) for name, operands, _ in body):
            found |= _overwritten(body * 2)
    return found


def _overwritten(body: list[tuple[str, str, str]]) -> set[str]:
    found, groups = set(), [set[int]()]  # registers of products in flight, by group; the last is not committed
    for name, operands, _ in body:
        if not name:
            continue
        if product := _ASYNC.match(operands):
            groups[-1] |= set(range(int(product[1]), int(product[1]) + 4))
        elif (written := re.match(r"R(\d+)", operands)) and not name.startswith("ST"):
            wide = next((n for suffix, n in _WIDTHS.items() if suffix in name), 1)
            if any(int(written[1]) + i in group for i in range(wide) for group in groups):
                found.add(f"{name} {operands}")
        if name == "WARPGROUP.DEPBAR.LE":
            groups = groups[-1 - int(operands.split(",")[1], 16) :]
        elif "gsb0" in operands:
            groups.append(set())
    return found
