"""SHA-256 of tensors, in pieces that threads share, and of JSON.

The digest of a tensor is ``sha256(label + sha256(piece 0) + sha256(piece 1) + …)``, where the label is the dtype's code
and the shape, as ``F32[32,64]``, and pieces are 16 MiB of the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

PIECE_BYTES = 16 << 20
HEX = 64
"""Characters of a digest."""


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
