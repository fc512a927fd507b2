"""Reads the instructions out of a cubin with nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)", re.MULTILINE)


def find_nvdisasm() -> str | None:
    """The PyPI package's nvdisasm, or the one on PATH."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).glob("*/bin/nvdisasm"):
            return str(path)
    return shutil.which("nvdisasm")


@cache
def listing(cubin: bytes) -> tuple[str, ...]:
    """Instruction names, with their modifiers, of every kernel in a cubin, in the order they stand in memory."""
    tool = find_nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
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
