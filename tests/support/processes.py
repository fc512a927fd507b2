"""What programs print that run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support import ROOT


def run(code: str, cwd: Path = ROOT) -> str:
    """What a program prints in a new process."""
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def run_each(first: str, codes: Iterable[str]) -> list[str]:
    """What codes print, each in a fork of one process that has run the first: importing torch takes seconds."""
    loop = f"""
import os, sys
{first}
for code in {list(codes)!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, code
        print("--", flush=True)
    else:
        exec(code, {{}})
        sys.stdout.flush()
        os._exit(0)
"""
    return [text.strip() for text in run(loop).removesuffix("--").split("--\n")]
