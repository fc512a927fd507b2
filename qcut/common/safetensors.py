"""Safetensors files, read with every number of the header checked first and every digest compared.

A file is the header's length (8 bytes), the header (JSON: dtype, shape and place of each tensor, and text under
``__metadata__``) and the tensors' bytes, without gaps. qcut's own facts are in the metadata under ``qcut``: digests,
which travel with the file, and which other readers do not heed. An index, a JSON file, names the data files in use, and
holds a digest of itself and of every header (`qcut.common.safetensors_writer`): no byte can change unseen.

The digest of a tensor is ``sha256(label + sha256(piece 0) + sha256(piece 1) + …)``, where the label is the dtype's code
and the shape, as ``F32[32,64]``, and pieces are 16 MiB of the data, which threads share.

The safetensors package maps a file into memory, which ends the process if the file is cut short meanwhile, and knows
no digests: it serves files of Hugging Face (`qcut.checkpoints.pretrained`), and the tests hold this module to it. Only
reading a tensor imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qcut.common import schema
from qcut.common.schema import (
    JSON_BYTES,
    closed_if_refused,
    file_size,
    open_regular,
    parse_json,
    read_bytes,
    read_into,
    read_up_to,
    uncollected,
)
from qcut.errors import QcutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
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
PIECE_BYTES = 16 << 20
HEX = 64
"""Characters of a digest."""
_CODES = {name: code for code, (name, _) in DTYPES.items()}
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
_INTEGRITY = schema.record(
    {}, {"digest": (schema.text(most=HEX), None), "headers": (schema.table(schema.text(most=HEX)), {})}, more=True
)
_TRIES = 100


def torch_dtype(code: str) -> torch.dtype | None:
    """Torch's dtype of a code that headers use; None of any other code."""
    import torch

    return getattr(torch, DTYPES[code][0]) if code in DTYPES else None


def dtype_code(dtype: torch.dtype) -> str | None:
    """The code of a dtype of torch; None if safetensors have none."""
    return _CODES.get(str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor in a header.

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


class TensorFile:
    """An open safetensors file: its header fits the file's size, and its tensors can be read.

    The file stays readable when it is deleted or replaced. Reading a tensor takes the tensor's memory and no more.

    Args:
        path: the file.
        error: class of the exceptions to raise.
        file: the file, if it is open already; closed with this object.

    Attributes:
        headers: of the tensors, by name.
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

    def read(self, name: str, *, verify: bool = True) -> Tensor:
        """Read a tensor into new memory on the CPU.

        Args:
            name: of the tensor.
            verify: compare with the digest, if the file has one.

        Raises:
            QcutError: of the file's class: the file cannot be read or has become shorter, or the digest differs.
        """
        import torch

        header = self.headers[name]
        dtype = torch_dtype(header.code)
        try:
            tensor = torch.empty(header.shape, dtype=dtype, device="cpu")
            data = tensor_data(tensor)
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
        if dtype is torch.bool and tensor.numel() and (most := int(tensor.view(torch.uint8).max())) > 1:
            raise self._error(f"{self.path}: tensor {name!r}: found the byte {most}; a BOOL is 0 or 1")
        return tensor

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


def tensor_data(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; of a copy if it is not contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def plain_name(name: object, path: Path, error: type[QcutError]) -> str:
    """Return a file name read from JSON, or raise ``error`` where the name could lead out of the directory."""
    plain = isinstance(name, str) and len(name.encode("utf-8", "replace")) <= 255 and "\0" not in name
    if not plain or Path(name).name != name or not name.endswith(".safetensors"):  # type: ignore[arg-type,union-attr]
        shown = name[:80] if isinstance(name, str) else name
        raise error(f"{path}: found the file name {shown!r}; a .safetensors file in the same directory is needed")
    return name  # type: ignore[return-value]


def read_index(
    path: Path,
    error: type[QcutError],
    check: Callable[[dict[str, Any]], tuple[Any, Iterable[str]]],
    *,
    verify: bool = True,
) -> tuple[Any, dict[str, TensorFile]]:
    """Read what `qcut.common.safetensors_writer.TensorFiles` wrote: the index, and all its data files, open.

    Args:
        path: the index.
        error: class of the exceptions to raise.
        check: is given the index's data, and returns what it makes of them, and the names of the data files.
        verify: compare digests, if there are any.

    Returns:
        What ``check`` made of the data, and the data files by name.

    Raises:
        QcutError: of class ``error``: a file is missing, unreadable, damaged, or not what the index states; or what
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


def tensor_digest(code: str, shape: Sequence[int], data: memoryview) -> str:
    """The digest of a tensor.

    Args:
        code: the dtype's in safetensors.
        shape: of the tensor.
        data: its bytes.
    """
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    digests = map(_piece, pieces) if len(pieces) < 2 else _threads().map(_piece, pieces)
    return hashlib.sha256(b"".join((f"{code}[{','.join(map(str, shape))}]".encode(), *digests))).hexdigest()


def bytes_digest(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def json_digest(data: Mapping[str, Any]) -> str:
    """The digest of JSON data: that of its shortest text with sorted keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _piece(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()  # hashlib lets other threads run meanwhile


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="qcut-digest")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked child has no threads
