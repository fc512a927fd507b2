"""The kernel cache on disk: one file per kernel, trusted and verified when read, never half written.

``$QCUT_CACHE_DIR``, or else the user's cache folder (``~/.cache/qcut``), holds ``kernels/{name}-{key}.qcut``. A file
is renamed into place, so a reader sees the whole file or none; a SHA-256 over the content shows what a crash or a bad
disk damaged. Entries hold code that will run: an entry or a directory that another user could have written is not used
(`qcut.jit.folders`). An entry that is not used is built again, with a warning that names the file. A cache that cannot
be written costs one warning, never a result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import struct
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcut.jit import folders
from qcut.jit.folders import directory as directory
from qcut.jit.keylocks import locked as locked

SCHEMA = 1
"""Version of the file format; part of every key."""

MAX_ENTRY_BYTES = 256 << 20
"""Largest file that is read or written."""

MAX_HEADER_BYTES = 4 << 20
"""Largest header of an entry: its facts as JSON."""

_MAGIC = b"qcut-kernel %d\n" % SCHEMA
_DIGEST_BYTES = 32
_FOLDER = "kernels"
_TEMPORARY = re.compile(r"\..*\.tmp", re.DOTALL)
_warned: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """Content of one cache file: JSON-able facts and named byte strings."""

    meta: dict[str, Any]
    blobs: dict[str, bytes]


class _BadEntryError(Exception):
    """A file that is no entry, or no longer."""


def entry_path(name: str, key: str) -> Path | None:
    """Return the path of a kernel's entry, whether the file exists or not; None without a cache directory.

    Args:
        name: procedural name; its first 120 characters make the file recognisable.
        key: hexadecimal digest that identifies the content.

    Raises:
        ConfigError: see `qcut.jit.folders.directory`.
    """
    base = directory()
    return base / _FOLDER / f"{name[:120]}-{key[:40]}.qcut" if base else None


def read(name: str, key: str) -> Entry | None:
    """Read an entry.

    Returns:
        The entry; None if the file is missing. If it is damaged, unreadable, larger than `MAX_ENTRY_BYTES`, or
        another user could have written it, a warning names it, and None is returned.

    Raises:
        ConfigError: see `qcut.jit.folders.directory`.
    """
    path = entry_path(name, key)
    if path is None:
        return None
    try:
        with folders.opened(path.parent.parent, _FOLDER) as folder:
            try:
                return _parse(_read_file(folder, path), key)
            except FileNotFoundError:
                return None
            except folders.DistrustedError as error:
                _warn_of_entry(str(error))
            except OSError as error:
                link = error.errno == errno.ELOOP
                _warn_of_entry(f"{path} " + ("is a symbolic link" if link else f"cannot be read ({error.strerror})"))
            except _BadEntryError as error:
                _warn_of_entry(f"{path} {error}")
    except FileNotFoundError:
        pass
    except OSError as error:
        _warn_of_folder(path.parent, "read", error)
    return None


def refuse(name: str, key: str, reason: str) -> None:
    """Warn that an entry, though whole, is of no use; the caller builds the kernel again."""
    if (path := entry_path(name, key)) is not None:
        _warn_of_entry(f"{path} {reason}")


def write(name: str, key: str, entry: Entry) -> bool:
    """Write or replace an entry. Others may write the same one at the same time: the last one stays.

    Returns:
        Whether the entry is on disk. A read-only directory or a full disk warns once and returns False.

    Raises:
        ConfigError: see `qcut.jit.folders.directory`.
    """
    path = entry_path(name, key)
    if path is None:
        _warn_once("there is no home directory", _FOLDER_ADVICE)
        return False
    sizes = [(blob, len(data)) for blob, data in entry.blobs.items()]
    header = json.dumps({"key": key, "name": name, "meta": entry.meta, "blobs": sizes}).encode()
    body = b"".join((struct.pack("<Q", len(header)), header, *entry.blobs.values()))
    try:
        if len(header) > MAX_HEADER_BYTES or len(_MAGIC) + _DIGEST_BYTES + len(body) > MAX_ENTRY_BYTES:
            raise OSError(errno.EFBIG, f"{path.name} would have {len(body)} bytes")
        with folders.opened(path.parent.parent, _FOLDER, make=True) as folder:
            _remove_leftovers(folder)
            _replace(folder, path.name, (_MAGIC, hashlib.sha256(body).digest(), body))
    except OSError as error:
        _warn_of_folder(path.parent, "written", error)
        return False
    return True


def discard(name: str, key: str) -> None:
    """Remove an entry, so that the next build compiles. An entry that cannot be removed is no error."""
    if path := entry_path(name, key):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# ── one file ─────────────────────────────────────────────────────────────────────────────────────


def _read_file(folder: int, path: Path) -> bytes:
    # O_NONBLOCK: opening a pipe must not wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path.name, flags, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _BadEntryError("is no regular file")
        if (error := folders.distrust(path, status)) is not None:
            raise error
        data = b"" if status.st_size > MAX_ENTRY_BYTES else file.read(MAX_ENTRY_BYTES + 1)
    if status.st_size > MAX_ENTRY_BYTES or len(data) > MAX_ENTRY_BYTES:
        raise _BadEntryError(f"has {status.st_size} bytes; allowed: {MAX_ENTRY_BYTES}")
    return data


def _parse(data: bytes, key: str) -> Entry:
    body = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) :][:_DIGEST_BYTES]:
        raise _BadEntryError("is damaged: its digest does not match")
    if len(body) < 8 or (length := int.from_bytes(body[:8], "little")) > min(len(body) - 8, MAX_HEADER_BYTES):
        raise _BadEntryError("is no entry: its header has another length than it says")
    try:
        header = json.loads(bytes(body[8 : 8 + length]))
        found, meta, sizes = header["key"], header["meta"], [(str(blob), size) for blob, size in header["blobs"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _BadEntryError(f"is no entry: its header is not understood ({type(error).__name__})") from None
    if found != key:
        raise _BadEntryError("is the entry of another kernel")
    offset, blobs = 8 + length, {}
    for blob, size in sizes:
        if type(size) is not int or not 0 <= size <= len(body) - offset:
            raise _BadEntryError(f"is no entry: {blob[:40]!r} has {str(size)[:40]} bytes")
        blobs[blob] = bytes(body[offset : offset + size])
        offset += size
    if not isinstance(meta, dict) or offset != len(body):
        raise _BadEntryError("is no entry: its header describes another content")
    return Entry(meta, blobs)


def _replace(folder: int, name: str, pieces: Iterable[bytes]) -> None:
    temporary, descriptor = _new_file(folder, name)
    try:
        with open(descriptor, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    with contextlib.suppress(OSError):  # the file is in place, and some file systems flush no directory
        os.fsync(folder)


def _new_file(folder: int, name: str) -> tuple[str, int]:
    """Make a temporary file, locked as long as it is open: one without a lock was left by a process that died."""
    while True:
        temporary = f".{name[-60:]}.{folders.host_tag()}.{secrets.token_hex(4)}.tmp"
        # Others may never write, whatever the umask is.
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return temporary, file
        os.close(file)  # taken for a leftover before it was locked


def _remove_leftovers(folder: int) -> None:
    """Delete the temporary files of processes that died."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            with contextlib.suppress(OSError):
                file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                try:
                    if folders.left_behind(name, os.fstat(file), file):
                        os.unlink(name, dir_fd=folder)
                finally:
                    os.close(file)


# ── warnings ─────────────────────────────────────────────────────────────────────────────────────

_FOLDER_ADVICE = (
    "kernels stay in memory and the next process builds them again (set QCUT_CACHE_DIR to a writable directory)"
)


def _warn_of_folder(folder: Path, what: str, error: OSError) -> None:
    if isinstance(error, folders.DistrustedError):
        _warn_once(f"{error}, so it is not used", _FOLDER_ADVICE)
    else:
        _warn_once(f"{folder} cannot be {what} ({error.strerror or error})", _FOLDER_ADVICE)


def _warn_of_entry(reason: str) -> None:
    _warn_once(reason, "its content is not used, and the kernel is built again")


def _warn_once(reason: str, advice: str) -> None:
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(f"qcut kernel cache: {reason}; {advice}", RuntimeWarning, stacklevel=5)
