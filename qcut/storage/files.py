"""Replaces files so that a crash leaves the old contents or the new ones, never a mixture; reads JSON back."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qcut.errors import QcutError


@contextlib.contextmanager
def replacing(*paths: Path) -> Iterator[list[Path]]:
    """Hand out an empty file beside each path; when the block ends, rename the files into place.

    The new files are flushed to disk before the first rename, and the directories after the last one. If the block
    raises, no path has changed and the new files are gone. New files have the mode that the process's umask gives them.

    Args:
        paths: the files to replace, renamed in this order; they need not exist.

    Yields:
        The paths of the new files. The block may write these files in place or replace them by others.

    Raises:
        OSError: a file cannot be created, flushed or renamed. Files that were renamed before the failure stay renamed.
    """
    beside = [path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in paths]
    modes = []
    try:
        for file_path in beside:
            with open(file_path, "xb") as file:
                modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        yield beside
        for file_path, mode in zip(beside, modes, strict=True):
            with open(file_path, "rb+") as file:
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        for file_path, path in zip(beside, paths, strict=True):
            os.replace(file_path, path)
    finally:
        for file_path in beside:
            with contextlib.suppress(OSError):
                file_path.unlink(missing_ok=True)
    for directory in dict.fromkeys(path.parent for path in paths):
        _flush_directory(directory)


def _flush_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # The files are in place, and some file systems flush no directory.
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Delete what `replacing` left beside a path in processes that were killed.

    No other process may be writing the path.

    Raises:
        OSError: a leftover cannot be deleted.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        leftover.unlink(missing_ok=True)


def write_bytes(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file by the pieces, one after the other, as `replacing` does."""
    with replacing(path) as (new,), open(new, "wb") as file:
        for piece in pieces:
            file.write(piece)


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text, as `replacing` does."""
    write_bytes(path, [text.encode()])


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file by indented JSON, as `replacing` does.

    Raises:
        ValueError: the data hold NaN or Inf, which JSON cannot express.
        OSError: see `replacing`.
    """
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_json(path: Path, error: type[QcutError]) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        error: class of the exception to raise.

    Raises:
        QcutError: of class ``error``, where the file is missing, unreadable, not JSON, or not an object.
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
