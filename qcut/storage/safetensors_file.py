"""One safetensors file: written with digests, read with every number of its header checked first.

A file is the header's length (8 bytes), the header (JSON: dtype, shape and place of each tensor, and text under
``__metadata__``) and the tensors' bytes, without gaps. Digests are in the metadata under ``qcut``, so that they travel
with the file; other readers of safetensors do not heed them.

The safetensors package maps a file into memory, which ends the process where the file is cut short meanwhile, and knows
no digests: it serves files of Hugging Face (`qcut.checkpoints.pretrained`), and the tests hold this module to it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from qcut.errors import QcutError
from qcut.storage import schema
from qcut.storage.digests import HEX, bytes_digest, tensor_digest
from qcut.storage.reading import closed_if_refused, file_size, open_regular, parse_json, read_into, read_up_to

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
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Torch dtypes by the codes that the headers of safetensors files use."""
HEADER_BYTES = 64 << 20
"""The longest header that is read."""

_CODES = {dtype: code for code, dtype in TENSOR_DTYPES.items()}
_DIMENSIONS = 32
_LENGTH = struct.Struct("<Q")
_METADATA, _OURS = "__metadata__", "qcut"
_SIZE = schema.integer(0, 1 << 62)
_ENTRY = schema.record(
    {
        "dtype": schema.text(choices=tuple(TENSOR_DTYPES)),
        "shape": schema.items(_SIZE, most=_DIMENSIONS),
        "data_offsets": schema.items(_SIZE, 2),
    }
)
_FACTS = schema.record(
    {"digests": schema.table(schema.text(most=HEX))},
    {"revision": (schema.text(most=64), ""), "files": (schema.table(schema.text(most=HEX)), {})},
    more=True,
)


@dataclass(frozen=True)
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return TENSOR_DTYPES[self.code]


class TensorFile:
    """An open safetensors file, whose header fits the file's size.

    The file stays readable when it is deleted or replaced. Reading a tensor takes the tensor's memory and no more.

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
        with closed_if_refused(self._file, path, error):
            self.size = file_size(self._file)
            self._read_header()

    def read(self, name: str, *, verify: bool = True) -> Tensor:
        """Read a tensor into new memory on the CPU.

        Args:
            name: of the tensor.
            verify: compare with the digest, where the file has one.

        Raises:
            QcutError: of the file's class: the file cannot be read or has become shorter, or the digest differs.
        """
        header = self.headers[name]
        try:
            tensor = torch.empty(header.shape, dtype=header.dtype, device="cpu")
            data = _data(tensor)
            self._file.seek(header.start)
            done = read_into(self._file, data)
        except (OSError, RuntimeError, MemoryError) as exc:
            raise self._error(f"{self.path}: tensor {name!r}: cannot be read: {exc}") from exc
        if done < header.nbytes:
            raise self._error(f"{self.path}: tensor {name!r}: the file ends in it")
        expected = self.facts.get("digests", {}).get(name)
        if verify and expected is not None:
            found = tensor_digest(header.code, header.shape, data)
            if found != expected:
                raise self._error(
                    f"{self.path}: tensor {name!r} is damaged: found the SHA-256 {found[:16]}…, "
                    f"{expected[:16]}… was written"
                )
        if header.dtype is torch.bool and tensor.numel() and (most := int(tensor.view(torch.uint8).max())) > 1:
            raise self._error(f"{self.path}: tensor {name!r}: found the byte {most}; a BOOL is 0 or 1")
        return tensor

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_header(self) -> None:
        path, error = self.path, self._error
        head = read_up_to(self._file, _LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        if not 2 <= length <= min(self.size - _LENGTH.size, HEADER_BYTES):
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
        metadata = schema.conform(data.pop(_METADATA, {}), schema.table(schema.text(most=length)), where, error)
        entries = schema.conform(data, schema.table(_ENTRY), where, error)
        self.headers = _places(entries, _LENGTH.size + length, self.size, path, error)
        self.facts: dict[str, Any] = {}
        if _OURS in metadata:
            where = f"{path}: metadata"
            self.facts = schema.conform(parse_json(metadata[_OURS].encode(), where, error), _FACTS, where, error)


def _places(
    entries: dict[str, Any], first: int, size: int, path: Path, error: type[QcutError]
) -> dict[str, TensorHeader]:
    """The tensors in the order of the file, which they fill without gaps."""
    headers: dict[str, TensorHeader] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        nbytes = math.prod(entry["shape"]) * TENSOR_DTYPES[entry["dtype"]].itemsize
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


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None, *, digests: bool = True
) -> str:
    """Write a safetensors file.

    Args:
        file: open for writing, empty.
        tensors: on the CPU; written as contiguous ones.
        facts: more for the metadata, beside the digests.
        digests: write them.

    Returns:
        The digest of the header's bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: a dtype that safetensors does not have, or a header beyond `HEADER_BYTES`.
    """
    header: dict[str, Any] = {}
    noted: dict[str, str] = {}
    # Wide types first, so that each tensor begins at a multiple of its item's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise ValueError(f"tensor {name!r}: safetensors have no {tensor.dtype}")
        code, shape = _CODES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
        if digests:
            noted[name] = tensor_digest(code, shape, _data(tensor))
    metadata = {"format": "pt"}
    if digests:
        metadata[_OURS] = json.dumps({**(facts or {}), "digests": noted})
    text = json.dumps({_METADATA: metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; at most {HEADER_BYTES} are read")
    head = _LENGTH.pack(len(text)) + text
    file.write(head)
    for name in order:
        file.write(_data(tensors[name]))
    return bytes_digest(head)


def _data(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
