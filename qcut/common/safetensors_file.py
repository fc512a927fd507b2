"""One safetensors file: written with digests, read with every number of its header checked first.

A file is the header's length (8 bytes), the header (JSON: dtype, shape and place of each tensor, and text under
``__metadata__``) and the tensors' bytes, without gaps. Digests are in the metadata under ``qcut``, so that they travel
with the file; other readers of safetensors do not heed them.

The safetensors package maps a file into memory, which ends the process where the file is cut short meanwhile, and knows
no digests: it serves files of Hugging Face (`qcut.checkpoints.pretrained`), and the tests hold this module to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from qcut.common.digests import bytes_digest, tensor_digest
from qcut.common.reading import read_into
from qcut.common.safetensors_header import DTYPES, HEADER_BYTES, LENGTH, METADATA, OURS, HeaderFile

TENSOR_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, (name, _) in DTYPES.items()}
"""Torch dtypes by the codes that the headers of safetensors files use."""

_CODES = {dtype: code for code, dtype in TENSOR_DTYPES.items()}


class TensorFile(HeaderFile):
    """An open safetensors file, whose tensors can be read. Reading one takes the tensor's memory and no more."""

    def read(self, name: str, *, verify: bool = True) -> Tensor:
        """Read a tensor into new memory on the CPU.

        Args:
            name: of the tensor.
            verify: compare with the digest, where the file has one.

        Raises:
            QcutError: of the file's class: the file cannot be read or has become shorter, or the digest differs.
        """
        header = self.headers[name]
        dtype = TENSOR_DTYPES[header.code]
        try:
            tensor = torch.empty(header.shape, dtype=dtype, device="cpu")
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
        if dtype is torch.bool and tensor.numel() and (most := int(tensor.view(torch.uint8).max())) > 1:
            raise self._error(f"{self.path}: tensor {name!r}: found the byte {most}; a BOOL is 0 or 1")
        return tensor


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
        metadata[OURS] = json.dumps({**(facts or {}), "digests": noted})
    text = json.dumps({METADATA: metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; at most {HEADER_BYTES} are read")
    head = LENGTH.pack(len(text)) + text
    file.write(head)
    for name in order:
        file.write(_data(tensors[name]))
    return bytes_digest(head)


def _data(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
