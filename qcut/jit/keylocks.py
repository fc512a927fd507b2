"""A lock for each key of the cache, so that a second process waits for the first one's build instead of repeating it.

A lock is a file that its holder has locked (``flock``): the lock of a process that dies is free. The holder touches the
file every few seconds. A waiter that sees no touch for `PATIENCE_S` stops waiting, since the holder was stopped or its
machine sleeps, and builds without the lock: two builds of one key are a waste, not an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

from qcut.jit import folders

PATIENCE_S = 30.0
"""Seconds without a sign of life of a lock's holder after which a waiter builds too."""

BEAT_S = 3.0
"""Seconds between a holder's signs of life."""

_POLL_S = (0.005, 0.1)  # between looks at a lock that is taken: at first, and at most


class _Held:
    """An open lock file. A forked child closes its copy, so that the lock does not outlive the process that took it."""

    def __init__(self, file: int) -> None:
        self.file: int | None = file
        _open_files.add(self)

    def close(self) -> None:
        """Let go of the lock. Does nothing in a child that was forked meanwhile: the lock is its parent's."""
        file, self.file = self.file, None
        if file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a fork that no handler saw may hold a copy of the descriptor
            os.close(file)


_open_files: weakref.WeakSet[_Held] = weakref.WeakSet()


def _after_fork() -> None:
    for held in list(_open_files):
        file, held.file = held.file, None
        if file is not None:
            os.close(file)


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold a key's lock, so that no other thread or process builds the key meanwhile.

    Where no lock file can be made, or the holder shows no life for `PATIENCE_S`, the block runs unlocked.

    Raises:
        ConfigError: see `qcut.jit.folders.directory`.
    """
    held = _open(key)
    if held is None:
        yield
        return
    try:
        if not _wait(held, key):
            yield
            return
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(held, ended), name="qcut-lock", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: waiting processes may build too
            beat.start()
        try:
            yield
        finally:
            ended.set()
            if held.file is not None and beat.ident is not None:
                beat.join()  # before the descriptor is closed and its number another file's
    finally:
        held.close()


def _open(key: str) -> _Held | None:
    if (base := folders.directory()) is None:
        return None
    try:
        with folders.opened(base, "locks", make=True) as folder:
            # O_NONBLOCK: opening something else than a file, such as a pipe, must not wait.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            held = _Held(os.open(_file_name(key), flags, 0o600, dir_fd=folder))
    except OSError:
        return None
    assert held.file is not None
    if stat.S_ISREG(os.fstat(held.file).st_mode):
        return held
    held.close()
    return None


def _wait(held: _Held, key: str) -> bool:
    """Take the lock; False if its holder shows no life, or the file system has no locks."""
    pause, last = _POLL_S
    seen, since = -1, time.monotonic()
    while (file := held.file) is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:
            return False
        else:
            with contextlib.suppress(OSError):  # the number only helps whoever looks for the holder
                os.ftruncate(file, 0)
                os.pwrite(file, b"%d\n" % os.getpid(), 0)
            return True
        touched, now = os.fstat(file).st_mtime_ns, time.monotonic()
        if touched != seen:
            seen, since = touched, now
        elif now - since > PATIENCE_S:
            _warn_of_holder(file, key)
            return False
        time.sleep(pause)
        pause = min(2 * pause, last)
    return False


def _beat(held: _Held, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):
            if (file := held.file) is not None:
                os.utime(file)


def _warn_of_holder(file: int, key: str) -> None:
    holder = os.pread(file, 20, 0).decode("ascii", "replace").strip() or "unknown"
    path = (folders.directory() or Path()) / "locks" / _file_name(key)
    warnings.warn(
        f"qcut kernel cache: process {holder}, which builds a kernel, has shown no life for {PATIENCE_S:.0f} s "
        f"(lock {path}); this process builds the kernel too",
        RuntimeWarning,
        stacklevel=5,
    )


def _file_name(key: str) -> str:
    return f"{key[:40]}.lock"
