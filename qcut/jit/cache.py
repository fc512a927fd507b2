"""The kernel cache on disk: one file per kernel, verified when read, never half written.

``$QCUT_CACHE_DIR``, or else the user's cache folder (``~/.cache/qcut``), holds ``kernels/{name}-{key}.qcut``. A file
is renamed into place, so a reader sees the whole file or none; a SHA-256 over the content makes a file that a crash or
a bad disk damaged count as missing. A lock per key makes a second process wait for the first process's build instead
of repeating it. A cache that cannot be written costs one warning, never a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from qcut.storage.files import remove_leftovers, write_bytes

SCHEMA = 1
"""Version of the file format; part of every key."""

LOCK_TIMEOUT_S = 900.0
"""Seconds to wait for another process's build before building too."""

_MAGIC = b"qcut-kernel %d\n" % SCHEMA
_DIGEST_BYTES = 32
_warned: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """Content of one cache file: JSON-able facts and named byte strings."""

    meta: dict[str, Any]
    blobs: dict[str, bytes]


def directory() -> Path | None:
    """The cache directory, absolute, whether it exists or not; None where no home directory is known.

    ``~`` in ``$QCUT_CACHE_DIR`` stands for the home directory, and a relative path is taken from the current directory.
    """
    try:
        return Path(os.environ.get("QCUT_CACHE_DIR") or platformdirs.user_cache_dir("qcut")).expanduser().absolute()
    except RuntimeError:
        return None


def entry_path(name: str, key: str) -> Path | None:
    """Return the path of a kernel's entry, whether the file exists or not.

    Args:
        name: procedural name; its first 120 characters make the file recognisable.
        key: hexadecimal digest that identifies the content.
    """
    base = directory()
    return base / "kernels" / f"{name[:120]}-{key[:40]}.qcut" if base else None


def read(name: str, key: str) -> Entry | None:
    """Read an entry.

    Returns:
        The entry, or None where the file is missing, truncated, corrupt, foreign or unreadable.
    """
    path = entry_path(name, key)
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[len(_MAGIC) + _DIGEST_BYTES :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) :][:_DIGEST_BYTES]:
        return None
    (header_bytes,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + header_bytes])
    if header["key"] != key:
        return None
    blobs, offset = {}, 8 + header_bytes
    for blob, size in header["blobs"]:
        blobs[blob] = body[offset : offset + size]
        offset += size
    return Entry(header["meta"], blobs)


def write(name: str, key: str, entry: Entry) -> bool:
    """Write or replace an entry. The caller holds the key's lock (`locked`).

    Returns:
        Whether the entry is on disk. A read-only directory or a full disk warns once and returns False.
    """
    path = entry_path(name, key)
    if path is None:
        _warn("there is no home directory")
        return False
    sizes = [(blob, len(data)) for blob, data in entry.blobs.items()]
    header = json.dumps({"key": key, "name": name, "meta": entry.meta, "blobs": sizes}).encode()
    body = b"".join((struct.pack("<Q", len(header)), header, *entry.blobs.values()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The caller holds the key's lock, so whatever lies beside the entry was left by a process that was killed.
        remove_leftovers(path)
        write_bytes(path, (_MAGIC, hashlib.sha256(body).digest(), body))
    except OSError as error:
        _warn(f"{path.parent} cannot be written ({error.strerror or error})")
        return False
    return True


def discard(name: str, key: str) -> None:
    """Remove an entry, so that the next build compiles. An entry that cannot be removed is no error."""
    if path := entry_path(name, key):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold a key's lock, so that no other thread or process builds the key meanwhile.

    Where no lock file can be made, or another process holds one longer than `LOCK_TIMEOUT_S`, the block
    runs unlocked: two builds of one key are a waste, not an error.
    """
    lock = _lock(key)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _lock(key: str) -> filelock.FileLock | None:
    base = directory()
    if base is None:
        return None
    try:
        (base / "locks").mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(base / "locks" / f"{key[:40]}.lock", timeout=LOCK_TIMEOUT_S)
        lock.acquire()
    except OSError:  # filelock's Timeout is one
        return None
    return lock


def _warn(reason: str) -> None:
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"qcut kernel cache: {reason}; kernels stay in memory and the next process builds them again "
        "(set QCUT_CACHE_DIR to a writable directory)",
        RuntimeWarning,
        stacklevel=4,
    )
