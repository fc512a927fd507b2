"""Folders for tests that write much."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, in memory where possible: what a killed process wrote is there too, and no disk waits."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
