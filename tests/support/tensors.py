"""Tensors of files that a test changes. Models and tensors that were read may lie in the file, which is replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put a file in the place of the one that is there, whose memory stays as it is."""
    written = path.with_suffix(".written")
    save_file(dict(tensors), written, metadata={"format": "pt"})
    os.replace(written, path)
