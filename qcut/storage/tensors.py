"""Saves tensors in safetensors files beside a JSON file that names them, so that a crash loses nothing.

A directory holds any number of data files and one JSON file, which names the data files in use. New data files get
fresh names, and the new JSON file is renamed into place last: that rename is the commit. Until the commit the old
files are whole and in use. Other files in the directory are never touched.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qcut.errors import QcutError
from qcut.storage.files import replacing, write_json

TENSOR_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Torch dtypes by the codes that the headers of safetensors files use."""


class TensorFiles:
    """Safetensors files beside a JSON file that names them.

    Args:
        directory: created if missing.
        prefix: data files are ``{prefix}-{random}-{number}.safetensors``.
        index: name of the JSON file.

    Attributes:
        directory: where the files are.
        index: name of the JSON file.
        written: names of the data files that `add` has written.
    """

    def __init__(self, directory: Path, prefix: str, index: str) -> None:
        self.directory, self.index = directory, index
        self._stem = f"{prefix}-{secrets.token_hex(4)}"
        data_file = rf"{re.escape(prefix)}-[0-9a-f]{{8}}-\d{{5}}\.safetensors"
        self._ours = re.compile(rf"{data_file}|\.{data_file}\.[0-9a-f]{{8}}\.tmp")
        self.written: list[str] = []
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: dict[str, Tensor]) -> str:
        """Write one data file and flush it to disk; returns its name. The file is not in use before `commit`."""
        name = f"{self._stem}-{len(self.written) + 1:05d}.safetensors"
        self.written.append(name)
        with replacing(self.directory / name) as (new,):
            save_file(tensors, new, metadata={"format": "pt"})
        return name

    def commit(self, data: Mapping[str, Any]) -> None:
        """Replace the JSON file, then delete data files of earlier saves."""
        write_json(self.directory / self.index, data)
        for path in self.directory.iterdir():
            if self._ours.fullmatch(path.name) and path.name not in self.written:
                with contextlib.suppress(OSError):  # The save has succeeded, and nothing names the old file.
                    path.unlink()

    def abandon(self) -> None:
        """Delete the data files that `add` wrote, unless the JSON file names them already (after an interrupt)."""
        index = self.directory / self.index
        if index.exists() and self._stem in index.read_text(encoding="utf-8"):
            return
        for name in self.written:
            (self.directory / name).unlink(missing_ok=True)


def open_tensors(path: Path, error: type[QcutError]) -> Any:
    """Open a safetensors file for reading, after checking its header against the file's size.

    Raises:
        QcutError: of class ``error``, where the file is missing, truncated or not safetensors.
    """
    if not path.is_file():
        raise error(f"{path}: there is no such file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as exc:
        raise error(f"{path}: truncated or not a safetensors file: {exc}") from exc


def plain_name(name: object, path: Path, error: type[QcutError]) -> str:
    """Return a file name read from JSON, or raise ``error`` where the name could lead out of the directory."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise error(f"{path}: found the file name {name!r}; a .safetensors file in the same directory is needed")
    return name
