"""Independent readers of formats without digests: what a broken file says, where a strict reader understands it."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""By name: dtype code, shape and bytes."""

SIZES = {
    "F8_E4M3": 1,
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}


class Unreadable(Exception):
    """The file says nothing: a reader of qcut's must refuse it."""


def safetensors(path: Path) -> Tensors:
    """The tensors of a file, bytes as they lie there."""
    data = path.read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        body = data[8 + length :]
        tensors: Tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                if not 0 <= begin <= end <= len(body) or end - begin != math.prod(shape) * SIZES[entry["dtype"]]:
                    raise Unreadable
                tensors[name] = (entry["dtype"], shape, body[begin:end])
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError, OverflowError) as error:
        raise Unreadable from error
    return tensors


def document(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Unreadable from error
    if not isinstance(data, dict):
        raise Unreadable
    return data


def llama2c(path: Path) -> dict[str, Any]:
    """The header of a llama2.c checkpoint, and the bytes of its tensors under their names and layers there."""
    data = path.read_bytes()
    if len(data) < 28:
        raise Unreadable
    dim, hidden, layers, heads, kv_heads, vocabulary, length = header = struct.unpack_from("<7i", data)
    if min(dim, hidden, layers, heads, kv_heads, length) < 1 or vocabulary == 0:
        raise Unreadable
    size = dim // heads
    kv = size * kv_heads
    tensors, at = {}, 28
    for name, count, floats in (
        ("embedding", 1, abs(vocabulary) * dim),
        ("rms_att", layers, dim),
        ("wq", layers, dim * dim),
        ("wk", layers, kv * dim),
        ("wv", layers, kv * dim),
        ("wo", layers, dim * dim),
        ("rms_ffn", layers, dim),
        ("w1", layers, hidden * dim),
        ("w2", layers, dim * hidden),
        ("w3", layers, hidden * dim),
        ("rms_final", 1, dim),
        ("tables", 1, length * (size // 2) * 2),
        *((("wcls", 1, -vocabulary * dim),) if vocabulary < 0 else ()),
    ):
        if at + 4 * count * floats > len(data):
            raise Unreadable
        for i in range(count):
            if name != "tables":
                tensors[f"{name}.{i}"] = data[at : at + 4 * floats]
            at += 4 * floats
    if at != len(data):
        raise Unreadable
    return {"header": header, "tensors": {name: digest(piece) for name, piece in tensors.items()}}


def llama2c_tokens(path: Path, vocabulary: int) -> list[tuple[bytes, float]]:
    """Pieces and scores of a llama2.c tokenizer."""
    data, at, tokens = path.read_bytes(), 4, []
    for _ in range(vocabulary):
        if at + 8 > len(data):
            raise Unreadable
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if length < 0 or at + length > len(data):
            raise Unreadable
        tokens.append((data[at : at + length], score))
        at += length
    if at != len(data):
        raise Unreadable
    return tokens


def digest(data: bytes) -> str:
    """A short name for bytes, for comparing and printing."""
    return hashlib.sha256(data).hexdigest()[:16]
