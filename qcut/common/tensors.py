"""Saves tensors in safetensors files beside a JSON file that names them, so that a crash loses nothing.

A directory holds any number of data files and one JSON file, the index, which names the data files in use. New data
files get fresh names, and the new index is renamed into place last: that rename is the commit. Data files never change.
Until the commit the old ones are whole and in use, and other files in the directory are never touched. One writer works
at a time. Readers take no lock: they open all that the index names, and start again where a newer index is in force.

The index holds a digest of itself and of every data file's header, which holds those of the tensors: no byte can change
unseen.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from qcut.common import schema
from qcut.common.digests import HEX, json_digest
from qcut.common.files import json_bytes, replacing, writing
from qcut.common.reading import JSON_BYTES, parse_json, read_bytes
from qcut.common.safetensors_file import TensorFile, write_tensors
from qcut.common.safetensors_header import plain_name
from qcut.errors import QcutError

_INTEGRITY = schema.record(
    {}, {"digest": (schema.text(most=HEX), None), "headers": (schema.table(schema.text(most=HEX)), {})}, more=True
)
_TRIES = 100


class TensorFiles:
    """A writer of safetensors files beside an index, for a ``with`` block.

    Other writers of the directory wait until the block ends. What dead ones left is deleted when it begins. If the
    block ends without `commit`, its files are gone.

    Args:
        directory: created if missing.
        prefix: data files are ``{prefix}-{random}-{number}.safetensors``.
        index: name of the JSON file.

    Attributes:
        directory: where the files are.
        index: name of the JSON file.
        written: names of the data files that `add` has written.

    Raises:
        OSError: the directory cannot be created or written, or another writer does not end.
    """

    def __init__(self, directory: Path, prefix: str, index: str) -> None:
        self.directory, self.index = directory, index
        self._stem = f"{prefix}-{secrets.token_hex(4)}"
        data_file = rf"{re.escape(prefix)}-[0-9a-f]{{8}}-\d{{5}}\.safetensors"
        self._ours = re.compile(rf"{data_file}|\.{data_file}\.[0-9a-f]{{8}}\.tmp")
        self.written: list[str] = []
        self._headers: dict[str, str] = {}

    def __enter__(self) -> TensorFiles:
        with ExitStack() as stack:
            stack.enter_context(writing(self.directory, self.index))
            self._remove_all_but(self._in_use())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not set(self.written) & self._in_use():  # else committed, even if an interrupt came right after
                self._remove(self.written)
        finally:
            self._stack.close()

    def add(self, tensors: Mapping[str, Tensor]) -> str:
        """Write one data file and flush it to disk; returns its name. The file is not in use before `commit`."""
        name = f"{self._stem}-{len(self.written) + 1:05d}.safetensors"
        self.written.append(name)
        with replacing(self.directory / name) as (file,):
            self._headers[name] = write_tensors(file, tensors)
        return name

    def commit(self, data: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Replace the index, then delete data files of earlier saves.

        Args:
            data: for the index; ``headers`` and ``digest`` are added.
            beside: more JSON files to replace, by name. They are renamed just before the index.

        Raises:
            OSError: see `qcut.common.files.replacing`.
            ValueError: see `qcut.common.files.json_bytes`; or the index would be larger than readers take.
        """
        whole = {**data, "headers": self._headers}
        contents = {name: json_bytes(one) for name, one in (beside or {}).items()}
        contents[self.index] = json_bytes({**whole, "digest": json_digest(whole)})
        if (size := len(contents[self.index])) > JSON_BYTES:
            raise ValueError(f"{self.index} would have {size} bytes; at most {JSON_BYTES} are read")
        with replacing(*(self.directory / name for name in contents)) as files:
            for file, text in zip(files, contents.values(), strict=True):
                file.write(text)
        self._remove_all_but(set(self.written))

    def _in_use(self) -> set[str]:
        """Data files that the index names; all of them where it cannot be read."""
        index = self.directory / self.index
        try:
            text = read_bytes(index, JSON_BYTES, QcutError).decode("utf-8", "replace")
        except QcutError:
            return {path.name for path in self.directory.iterdir()} if os.path.lexists(index) else set()
        return {match for match in self._ours.findall(text) if not match.startswith(".")}

    def _remove_all_but(self, kept: set[str]) -> None:
        names = [path.name for path in self.directory.iterdir()]
        self._remove(name for name in names if self._ours.fullmatch(name) and name not in kept)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # Nothing names the file, and the next writer tries again.
                (self.directory / name).unlink(missing_ok=True)


def read_index(
    path: Path,
    error: type[QcutError],
    check: Callable[[dict[str, Any]], tuple[Any, Iterable[str]]],
    *,
    verify: bool = True,
) -> tuple[Any, dict[str, TensorFile]]:
    """Read what `TensorFiles` wrote: the index, and all its data files, open.

    Args:
        path: the index.
        error: class of the exceptions to raise.
        check: is given the index's data, and returns what it makes of them, and the names of the data files.
        verify: compare digests, where there are any.

    Returns:
        What ``check`` made of the data, and the data files by name.

    Raises:
        QcutError: of class ``error``: a file is missing, unreadable, damaged, or not what the index says; or what
            ``check`` raises.
    """
    for _ in range(_TRIES):
        text = read_bytes(path, JSON_BYTES, error)
        try:
            return _open_index(text, path, error, check, verify)
        except QcutError:
            # A newer index may be in force, and the files of this one gone.
            if not _has_changed(path, text, error):
                raise
    raise error(f"{path}: replaced {_TRIES} times while it was read")


def _open_index(
    text: bytes,
    path: Path,
    error: type[QcutError],
    check: Callable[[dict[str, Any]], tuple[Any, Iterable[str]]],
    verify: bool,
) -> tuple[Any, dict[str, TensorFile]]:
    data = parse_json(text, path, error)
    if not isinstance(data, dict):
        raise error(f"{path}: found a JSON {type(data).__name__}, an object is needed")
    made, names = check(data)
    integrity = schema.conform(data, _INTEGRITY, path, error)
    digest = integrity["digest"]
    if verify and digest is None and integrity["headers"]:
        raise error(f"{path}: damaged: it has digests of its data files and none of its own")
    if verify and digest is not None and digest != json_digest({k: v for k, v in data.items() if k != "digest"}):
        raise error(
            f"{path}: damaged: its contents are not those whose SHA-256 it holds, {digest[:16]}…; "
            "verify=False reads what was changed by hand"
        )
    with ExitStack() as opened:
        files = {}
        for name in sorted(set(names)):
            file = opened.enter_context(TensorFile(path.parent / plain_name(name, path, error), error))
            expected = integrity["headers"].get(name)
            if verify and expected is not None and file.header_digest != expected:
                raise error(
                    f"{file.path}: damaged, or of another save: its header's SHA-256 is {file.header_digest[:16]}…, "
                    f"{path.name} has {expected[:16]}…"
                )
            files[name] = file
        opened.pop_all()
    return made, files


def _has_changed(path: Path, text: bytes, error: type[QcutError]) -> bool:
    try:
        return read_bytes(path, JSON_BYTES, error) != text
    except QcutError:
        return False
