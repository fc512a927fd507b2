"""Writing and reading safetensors + JSON so that a crash loses nothing.

A directory holds any number of data files and one JSON file that names the ones in use. Data files get fresh names,
the JSON is renamed into place last: that rename is the commit. Until then the old contents are whole and in use;
other people's files in the directory are never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qcut.errors import QcutError

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
"""Torch's dtypes by the codes in the headers of safetensors files."""


def read_json(path: Path, error: type[QcutError]) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        QcutError: of the class given, where the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: there is no such file") from None
    except (OSError, ValueError) as exc:
        raise error(f"{path}: not readable as JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise error(f"{path}: found a JSON {type(data).__name__}, an object is needed")
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name in the same directory, flush it to disk, and rename it into place."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """`write_text` of indented JSON; NaN and Inf are refused, being no JSON."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class TensorFiles:
    """Safetensors files beside a JSON file that names them.

    Args:
        directory: created if missing.
        prefix: data files are ``{prefix}-{random}-{number}.safetensors``.
        index: name of the JSON file.
    """

    def __init__(self, directory: Path, prefix: str, index: str) -> None:
        self.directory, self.index = directory, index
        self._stem = f"{prefix}-{secrets.token_hex(4)}"
        self._ours = re.compile(rf"{re.escape(prefix)}-[0-9a-f]{{8}}-\d{{5}}\.safetensors(\.tmp)?")
        self.written: list[str] = []
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: dict[str, Tensor]) -> str:
        """Write one data file and flush it to disk; returns its name. It is not in use before `commit`."""
        name = f"{self._stem}-{len(self.written) + 1:05d}.safetensors"
        path = self.directory / name
        self.written.append(name)
        save_file(tensors, f"{path}.tmp", metadata={"format": "pt"})
        with open(f"{path}.tmp", "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(f"{path}.tmp", 0o666 & ~_umask())
        os.replace(f"{path}.tmp", path)
        return name

    def commit(self, data: Mapping[str, Any]) -> None:
        """Rename the JSON into place, then delete data files of earlier saves."""
        write_json(self.directory / self.index, data)
        for path in self.directory.iterdir():
            if self._ours.fullmatch(path.name) and path.name not in self.written:
                with contextlib.suppress(OSError):  # Nothing refers to it, and the save has succeeded.
                    path.unlink()

    def abandon(self) -> None:
        """Delete what `add` wrote, unless the JSON already refers to it (an interrupt just after the rename)."""
        index = self.directory / self.index
        if index.exists() and self._stem in index.read_text(encoding="utf-8"):
            return
        for name in self.written:
            (self.directory / name).unlink(missing_ok=True)
            (self.directory / f"{name}.tmp").unlink(missing_ok=True)


def open_tensors(path: Path, error: type[QcutError]) -> Any:
    """A safetensors file opened for reading; its header has been checked against its size.

    Raises:
        QcutError: of the class given, where the file is missing, truncated or not safetensors.
    """
    if not path.is_file():
        raise error(f"{path}: there is no such file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as exc:
        raise error(f"{path}: truncated or not a safetensors file: {exc}") from exc


def plain_name(name: object, path: Path, error: type[QcutError]) -> str:
    """A file name read from JSON, refused where it could lead out of the directory."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise error(f"{path}: found the file name {name!r}; a .safetensors file in the same directory is needed")
    return name
