"""Changes to files that were written: of JSON data, and of tensors, whose file keeps its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file


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
