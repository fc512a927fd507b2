"""The header of a safetensors file, with every number checked before it is used. This module imports no torch.

A file is the header's length (8 bytes), the header (JSON: dtype, shape and place of each tensor, and text under
``__metadata__``) and the tensors' bytes, without gaps. qcut's own facts are in the metadata under ``qcut``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qcut.common import schema
from qcut.common.digests import HEX, bytes_digest
from qcut.common.reading import closed_if_refused, file_size, open_regular, parse_json, read_up_to, uncollected
from qcut.errors import QcutError

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
"""By the codes that headers use, the name of torch's dtype, and the bytes of one value."""
HEADER_BYTES = 64 << 20
"""The longest header that is read."""
LENGTH = struct.Struct("<Q")
"""The header's length, in front of it."""
METADATA, OURS = "__metadata__", "qcut"
"""Keys of the header's text, and of qcut's own facts in it."""
_DIMENSIONS = 32
_SIZE = schema.integer(0, 1 << 62)
_ENTRY = schema.record(
    {
        "dtype": schema.text(choices=tuple(DTYPES)),
        "shape": schema.items(_SIZE, most=_DIMENSIONS),
        "data_offsets": schema.items(_SIZE, 2),
    }
)
_FACTS = schema.record(
    {"digests": schema.table(schema.text(most=HEX))},
    {"revision": (schema.text(most=64), ""), "files": (schema.table(schema.text(most=HEX)), {})},
    more=True,
)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a header says of one tensor.

    Attributes:
        code: the dtype's code.
        shape: of the tensor.
        start: its first byte in the file.
        nbytes: its size.
    """

    code: str
    shape: list[int]
    start: int
    nbytes: int


class HeaderFile:
    """An open safetensors file, whose header fits the file's size.

    The file stays readable when it is deleted or replaced.

    Args:
        path: the file.
        error: class of the exceptions to raise.
        file: the file, where it is open already; closed with this object.

    Attributes:
        headers: what the header says, by tensor.
        facts: what qcut's writer noted: ``digests`` by tensor, ``revision``, digests of other ``files``; empty in files
            of other writers.
        header_digest: of the header's bytes.
        size: bytes of the file.

    Raises:
        QcutError: of class ``error``: no such file, not a regular one, truncated, not safetensors, or sizes that
            contradict the file's (the tensor is named).
    """

    def __init__(self, path: Path, error: type[QcutError], file: BinaryIO | None = None) -> None:
        self.path, self._error = path, error
        self._file = open_regular(path, error) if file is None else file
        with closed_if_refused(self._file, path, error), uncollected():
            self.size = file_size(self._file)
            self._read_header()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_header(self) -> None:
        path, error = self.path, self._error
        head = read_up_to(self._file, LENGTH.size)
        length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else -1
        if not 2 <= length <= min(self.size - LENGTH.size, HEADER_BYTES):
            raise error(
                f"{path}: truncated or not a safetensors file: {self.size} bytes, with a header of {length}; "
                f"allowed: 2 to {HEADER_BYTES}, within the file"
            )
        text = read_up_to(self._file, length)
        if len(text) < length:
            raise error(f"{path}: truncated or not a safetensors file: the file ends in its header")
        self.header_digest = bytes_digest(head + text)
        where = f"{path}: truncated or not a safetensors file: header"
        data = parse_json(text, where, error)
        if not isinstance(data, dict):
            raise error(f"{where}: found a {type(data).__name__}; an object is needed")
        metadata = schema.conform(data.pop(METADATA, {}), schema.table(schema.text(most=length)), where, error)
        entries = schema.conform(data, schema.table(_ENTRY), where, error)
        self.headers = _places(entries, LENGTH.size + length, self.size, path, error)
        self.facts: dict[str, Any] = {}
        if OURS in metadata:
            where = f"{path}: metadata"
            self.facts = schema.conform(parse_json(metadata[OURS].encode(), where, error), _FACTS, where, error)


def _places(
    entries: dict[str, Any], first: int, size: int, path: Path, error: type[QcutError]
) -> dict[str, TensorHeader]:
    """The tensors in the order of the file, which they fill without gaps."""
    headers: dict[str, TensorHeader] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        nbytes = math.prod(entry["shape"]) * DTYPES[entry["dtype"]][1]
        if start != end or stop - start != nbytes or first + stop > size:
            raise error(
                f"{path}: truncated or not a safetensors file: tensor {name!r}: {entry['dtype']} {entry['shape']} at "
                f"{start} to {stop}; {nbytes} bytes from {end} on are needed, and {size - first} are there"
            )
        headers[name] = TensorHeader(entry["dtype"], entry["shape"], first + start, nbytes)
        end = stop
    if first + end != size:
        raise error(
            f"{path}: truncated or not a safetensors file: {size - first - end} bytes lie behind the last tensor"
        )
    return headers


def plain_name(name: object, path: Path, error: type[QcutError]) -> str:
    """Return a file name read from JSON, or raise ``error`` where the name could lead out of the directory."""
    plain = isinstance(name, str) and len(name.encode("utf-8", "replace")) <= 255 and "\0" not in name
    if not plain or Path(name).name != name or not name.endswith(".safetensors"):  # type: ignore[arg-type,union-attr]
        shown = name[:80] if isinstance(name, str) else name
        raise error(f"{path}: found the file name {shown!r}; a .safetensors file in the same directory is needed")
    return name  # type: ignore[return-value]
