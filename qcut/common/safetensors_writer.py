"""Saves tensors in safetensors files and a JSON file that names them, so that a crash loses nothing.

A directory holds any number of data files and one JSON file, the index, which names the data files in use. New data
files get fresh names, and the new index is renamed into place last: that rename is the commit. Data files never change.
Until the commit the old ones are whole and in use, and other files in the directory are never touched. One writer works
at a time. Readers (`qcut.common.safetensors.read_index`) take no lock: they open all that the index names, and start
again if a newer index is in force.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from torch import Tensor

from qcut.common.files import json_bytes, replacing, writing
from qcut.common.safetensors import (
    HEADER_BYTES,
    LENGTH,
    METADATA,
    OURS,
    bytes_digest,
    dtype_code,
    json_digest,
    tensor_data,
    tensor_digest,
)
from qcut.common.schema import JSON_BYTES, NAME_LENGTH, read_bytes
from qcut.errors import QcutError


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None, *, digests: bool = True
) -> str:
    """Write a safetensors file.

    Args:
        file: open for writing, empty.
        tensors: on the CPU; written as contiguous ones.
        facts: more for the metadata, besides the digests.
        digests: write them.

    Returns:
        The digest of the header's bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: a dtype that safetensors does not have, a name that readers refuse, or a header beyond
            `HEADER_BYTES`.
    """
    header: dict[str, Any] = {}
    noted: dict[str, str] = {}
    # Wide types first, so that each tensor begins at a multiple of its item's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in order:
        if name == METADATA or len(name) > NAME_LENGTH or name.encode("utf-8", "replace").decode() != name:
            raise ValueError(
                f"tensor {name[:80]!r}: found a name of {len(name)} characters; allowed: up to {NAME_LENGTH} of "
                f"Unicode, and not {METADATA!r}"
            )
        tensor = tensors[name]
        code, shape = dtype_code(tensor.dtype), list(tensor.shape)
        if code is None:
            raise ValueError(f"tensor {name!r}: safetensors have no {tensor.dtype}")
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
        if digests:
            noted[name] = tensor_digest(code, shape, tensor_data(tensor))
    metadata = {"format": "pt"}
    if digests:
        metadata[OURS] = json.dumps({**(facts or {}), "digests": noted})
    text = json.dumps({METADATA: metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; at most {HEADER_BYTES} are read")
    head = LENGTH.pack(len(text)) + text
    file.write(head)
    for name in order:
        file.write(tensor_data(tensors[name]))
    return bytes_digest(head)


class TensorFiles:
    """A writer of safetensors files and their index, for a ``with`` block.

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
            beside: further JSON files to replace, by name. They are renamed just before the index.

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
        """Data files that the index names; all of them if it cannot be read."""
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
