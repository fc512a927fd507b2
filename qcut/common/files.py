"""Replaces files so that a crash leaves the old contents or the new ones, never a mixture.

A new file is written under a temporary name, ``.{name}.{random}.tmp``, flushed, and renamed into place. Its writer
holds a lock on it, so that the next writer can distinguish a leftover of a killed process from a file in progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

_LEFTOVER_AGE_S = 24 * 3600
"""Where the file system has no locks, a temporary file of this age is a leftover."""


@contextlib.contextmanager
def replacing(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Hand out an empty file for each path; when the block ends, rename the files into place.

    The new files are flushed to disk before the first rename, and the directories after the last one. If the block
    raises, no path has changed and the new files are gone. New files have the mode that the process's umask gives them.
    Leftovers of killed processes next to the paths are deleted.

    Args:
        paths: the files to replace, renamed in this order; they need not exist.

    Yields:
        The new files, open for writing. The block writes them and leaves them open.

    Raises:
        OSError: a file cannot be created, flushed or renamed. Files that were renamed before the failure stay renamed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(temporary(path)) for path in paths]
        yield files
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        for file, path in zip(files, paths, strict=True):
            os.replace(file.name, path)
    for directory in dict.fromkeys(path.parent for path in paths):
        flush_directory(directory)


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[BinaryIO]:
    """An empty file next to a path, locked while the block runs; deleted afterwards unless it was renamed.

    Raises:
        OSError: the file cannot be created.
    """
    remove_leftovers(path)
    file = _new_file(path)
    try:
        # Closed twice if the block fails: the buffer may not fit on a full disk, and the file goes anyway.
        yield file
        file.close()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        with contextlib.suppress(OSError):
            file.close()


def _new_file(path: Path) -> BinaryIO:
    while True:
        file = open(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"), "xb")  # noqa: SIM115 -- `temporary`
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if is_at(file.name, file.fileno()):
            return file
        file.close()  # Another writer took the file for a leftover before it was locked.


def is_at(path: str | Path, handle: int) -> bool:
    """Whether a path is the file that is open under a descriptor."""
    try:
        found, held = os.stat(path), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files of a path that killed writers left; files in progress and all others stay."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            _remove_if_dead(leftover)


def _remove_if_dead(leftover: Path) -> None:
    handle = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - os.fstat(handle).st_mtime < _LEFTOVER_AGE_S:
                return
        leftover.unlink()
    finally:
        os.close(handle)


def flush_directory(directory: Path) -> None:
    """Bring renames in a directory to the disk, if the file system can."""
    with contextlib.suppress(OSError):  # The files are in place, and some file systems flush no directory.
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_directory(directory: Path) -> list[Path]:
    """Create a directory and its parents if they are missing, and bring their names to the disk.

    Returns:
        The directories that were created, the innermost first.

    Raises:
        OSError: one cannot be created.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush_directory(folder.parent)
    return missing


def write_bytes(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file by the pieces, one after the other, as `replacing` does."""
    with replacing(path) as (file,):
        for piece in pieces:
            file.write(piece)


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text, as `replacing` does."""
    write_bytes(path, [text.encode()])


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Indented JSON.

    Raises:
        ValueError: the data hold NaN or Inf, which JSON cannot express.
    """
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file by indented JSON, as `replacing` does.

    Raises:
        ValueError: see `json_bytes`.
        OSError: see `replacing`.
    """
    write_bytes(path, [json_bytes(data)])


# ── one writer at a time ─────────────────────────────────────────────────────────────────────────

LOCK_WAIT_S = 600.0
"""Seconds to wait for another writer of a directory."""
_PAUSE_S = 0.02
_TRIES = 10
_held: set[int] = set()


@contextlib.contextmanager
def writing(directory: Path, name: str, wait_s: float | None = None) -> Iterator[None]:
    """Keep other writers, of this process and of others, from a directory while the block runs.

    The lock is a file, ``.{name}.lock``, which is gone afterwards. A process that dies frees the lock.

    Args:
        directory: created if missing, and removed again if the block leaves nothing in it.
        name: of what is written there; writers of other names are not kept away.
        wait_s: how long to wait for another writer; None takes `LOCK_WAIT_S`.

    Raises:
        OSError: directory or lock cannot be created, the file system has no locks, or another writer holds the lock for
            longer (a TimeoutError).
    """
    path = directory / f".{name}.lock"
    created: list[Path] = []
    try:
        for attempt in reversed(range(_TRIES)):
            created += make_directory(directory)
            try:
                handle = _lock(path, LOCK_WAIT_S if wait_s is None else wait_s)
                break
            except FileNotFoundError:  # Another writer had made the directory, left nothing in it, and removed it.
                if not attempt:
                    raise
        try:
            yield
        finally:
            if handle in _held:  # else this is a forked child, and the lock its parent's
                with contextlib.suppress(OSError):
                    if is_at(path, handle):
                        path.unlink()
                _held.discard(handle)
                os.close(handle)
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # where something lies in it
                folder.rmdir()


def _lock(path: Path, wait_s: float) -> int:
    end = time.monotonic() + wait_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(path, handle):  # else its holder deleted the file between the two lines above
                _held.add(handle)
                return handle
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(handle)
                raise TimeoutError(
                    f"another process has been writing here for {wait_s:g} s and still holds {path.name}"
                ) from None
            time.sleep(_PAUSE_S)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _forget_locks() -> None:
    """In a forked child: a copy of the parent's lock would outlive the parent."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)
