"""Reads the instructions out of a cubin with nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache

import pytest

from qcut.errors import ToolchainError
from qcut.jit.toolchain import find_nvdisasm

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
        # Code alone, without the analysis of data flow, which takes half the time.
        command = [tool, "-c", "-ndf", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(_INSTRUCTION.findall(text))


def instructions(cubin: bytes) -> set[str]:
    """The distinct ones of `listing`."""
    return set(listing(cubin))
