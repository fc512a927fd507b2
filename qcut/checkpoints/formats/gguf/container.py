"""The container of llama.cpp: metadata and the places of tensors, every number checked against the file's size.

Little-endian: ``GGUF``, uint32 version (2 or 3), uint64 tensors, uint64 entries of metadata; the entries (a name, a
type and a value); for each tensor a name, uint32 dimensions, their extents (the innermost first), uint32 type and
uint64 offset; then, aligned, the data.
"""

from __future__ import annotations

import io
import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.checkpoints.formats.gguf.blocks import FLOATS, TYPES
from qcut.common.schema import closed_if_refused, file_size, open_regular, read_into, read_up_to
from qcut.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_TEXT = 1 << 24
_MOST_ENTRIES, _MOST_VALUES = 1 << 12, 1 << 21
_MOST_TENSORS, _MOST_PARTS = 1 << 18, 1 << 12
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_READ = {form.number: kind for kind, form in TYPES.items()}
_OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


class GgufTensor(NamedTuple):
    """Where a tensor is.

    Attributes:
        kind: of its values, a key of the types that are read.
        shape: the outermost extent first, as torch counts.
        start: its first byte in the file.
        nbytes: its size.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """An open GGUF file with all of its tensors inside the file.

    Args:
        path: the file.

    Attributes:
        metadata: values by name.
        tensors: by name.

    Raises:
        CheckpointError: truncated, not GGUF, or sizes that contradict the file's.
        UnsupportedError: another version, or a tensor of a type that is not read (named).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path, CheckpointError)
        with closed_if_refused(self._file, path, CheckpointError):
            self._size, self._values = file_size(self._file), 0
            self._head = io.BufferedReader(self._file)  # type: ignore[type-var]
            try:
                self._read_head()
            finally:
                self._head.detach()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, name: str, part: int | None = None) -> Tensor:
        """A tensor of floats in its shape, or the blocks of quantized rows, uint8 ``[..., K / values, bytes]``.

        Args:
            name: of the tensor.
            part: read only this one of the parts that the outermost extent counts.

        Raises:
            CheckpointError: the file has become shorter.
        """
        kind, shape, start, nbytes = self.tensors[name]
        if part is not None:
            nbytes, shape = nbytes // shape[0], shape[1:]
            start += part * nbytes
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._file.seek(start)
        if read_into(self._file, data.numpy().data) < nbytes:
            raise CheckpointError(f"{self.path}: tensor {name!r}: the file ends in it")
        if kind in FLOATS:
            return data.view(FLOATS[kind]).view(shape)
        form = TYPES[kind]
        return data.view(*shape[:-1], shape[-1] // form.size, form.nbytes)

    def _read_head(self) -> None:
        if read_up_to(self._head, 4) != MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file: it does not begin with GGUF")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise UnsupportedError(f"{self.path}: GGUF of version {version}; 2 and 3, little-endian, are read")
        tensors, entries = self._count(_MOST_TENSORS, "tensors"), self._count(_MOST_ENTRIES, "entries of metadata")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text()
            if key in self.metadata:
                raise CheckpointError(f"{self.path}: metadata {key[:80]!r} is there twice")
            self.metadata[key] = self._value(self._scalar("<I"), 0)
        places = [self._place() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}; allowed: powers of two from 8")
        first = -(-self._head.tell() // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in places:
            form = TYPES[kind]
            nbytes = math.prod(shape) // form.size * form.nbytes
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} is there twice")
            if not shape or shape[-1] % form.size or first + offset + nbytes > self._size:
                raise CheckpointError(
                    f"{self.path}: truncated, or not a GGUF file: tensor {name!r}: {kind} {list(shape)} at {offset}; "
                    f"{self._size - first} bytes of data are there"
                )
            self.tensors[name] = GgufTensor(kind, shape, first + offset, nbytes)
        end, before = first, ""
        for name, place in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if place.nbytes and place.start < end:
                raise CheckpointError(
                    f"{self.path}: tensors {before!r} and {name!r} overlap; allowed: a place in the file for each"
                )
            if place.nbytes:
                end, before = place.start + place.nbytes, name

    def _place(self) -> tuple[str, str, tuple[int, ...], int]:
        name, dimensions = self._text(), self._scalar("<I")
        if not 1 <= dimensions <= 4:
            raise CheckpointError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; allowed: 1 to 4")
        extents = [self._count(1 << 40, f"extent of {name!r}") for _ in range(dimensions)]
        kind, offset = self._scalar("<I"), self._count(1 << 62, f"offset of {name!r}")
        if kind not in _READ:
            known = _OTHERS.get(kind, f"number {kind}")
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} is of the type {known}; {', '.join(TYPES)} are served"
            )
        return name, _READ[kind], tuple(reversed(extents)), offset

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._head.tell():
            raise CheckpointError(f"{self.path}: truncated, or not a GGUF file: {count} bytes more are needed")
        return self._head.read(count)

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self, most: int, what: str) -> int:
        found: int = self._scalar("<Q")
        if found > most:
            raise CheckpointError(f"{self.path}: found {found} {what}; at most {most} are read")
        return found

    def _text(self) -> str:
        length = self._count(_MOST_TEXT, "bytes of text")
        return self._bytes(length).decode("utf-8", "replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth > 2:
            raise CheckpointError(f"{self.path}: a value of metadata of the type {kind}; allowed: 0 to 12")
        inner, count = self._scalar("<I"), self._count(_MOST_VALUES - self._values, "values of metadata")
        self._values += count
        if inner in _SCALARS:
            size = struct.calcsize(_SCALARS[inner])
            return list(struct.unpack(f"<{count}{_SCALARS[inner][1]}", self._bytes(count * size)))
        return [self._value(inner, depth + 1) for _ in range(count)]


def parts_of(path: Path) -> list[Path]:
    """All files of a model, given one: names of several files end in ``-00001-of-00003.gguf``."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, min(count, _MOST_PARTS) + 1)]


class GgufModel:
    """A model in one open GGUF file, or in several.

    Args:
        path: the file, or any of several.

    Attributes:
        path: the first file.
        metadata: of the first file.
        tensors: of all files, by name.

    Raises:
        CheckpointError: see `GgufFile`; or a file is missing, or does not belong to the others.
        UnsupportedError: see `GgufFile`.
    """

    def __init__(self, path: Path) -> None:
        paths = parts_of(path)
        self.path, self._files = paths[0], list[GgufFile]()
        self._owners: dict[str, GgufFile] = {}
        try:
            for i, one in enumerate(paths):
                self._add(GgufFile(one), i, len(paths))
            self.metadata = self._files[0].metadata
            self.tensors = {name: file.tensors[name] for name, file in self._owners.items()}
            stated = self.metadata.get("split.tensors.count", len(self.tensors))
            if stated != len(self.tensors):
                raise CheckpointError(f"{self.path}: split.tensors.count is {stated!r}; found {len(self.tensors)}")
        except BaseException:
            self.close()
            raise

    def _add(self, file: GgufFile, index: int, count: int) -> None:
        self._files.append(file)
        found = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1)
        if found != (index, count) and (found[1] not in (0, 1) or count > 1):
            raise CheckpointError(
                f"{file.path}: split.no and split.count are {found[0]!r} and {found[1]!r}; by its name {index} and "
                f"{count} are needed"
            )
        for name in file.tensors:
            if self._owners.setdefault(name, file) is not file:
                raise CheckpointError(f"{file.path}: tensor {name!r} is in {self._owners[name].path.name} too")

    def read(self, name: str, part: int | None = None) -> Tensor:
        """See `GgufFile.read`."""
        return self._owners[name].read(name, part)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> GgufModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
