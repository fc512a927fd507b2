"""Tensors of files that a test changes."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def tensors_of(path: Path) -> dict[str, Tensor]:
    """A file's tensors, in memory of their own: those of `load_file` lie in the file, which may be written again."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}
