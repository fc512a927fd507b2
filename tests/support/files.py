"""Files that a test changes after they were written, and folders for tests that write much."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Read a JSON or safetensors file, change its data in place, and write it again; digests stay what they were."""
    if path.suffix == ".json":
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        return
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a safetensors file; mappings of the old file stay valid."""
    written = path.with_suffix(".written")
    save_file(dict(tensors), written, metadata={"format": "pt"})
    os.replace(written, path)


MEMORY = Path("/dev/shm")


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, in memory where possible: what a killed process wrote is there too, and no disk waits."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
