"""A journal of a tuner's measurements: JSON lines, each written to disk before the next measurement.

A run that is killed loses the measurement in progress. The next run reads the journal and repeats no measurement. A
line holds a checksum of itself; one that was damaged is measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcut.common import schema
from qcut.common.files import flush_directory, make_directory
from qcut.common.schema import parse_json
from qcut.errors import ConfigError

JOURNAL_BYTES = 256 << 20
"""The largest journal that is read: some million measurements."""
_LINE_BYTES = 1 << 20
_CHECKSUM = "crc32"
_FACT = schema.record(
    {"key": schema.text(most=_LINE_BYTES)},
    {
        _CHECKSUM: (schema.integer(0, (1 << 32) - 1), None),
        "us": (schema.number(least=0.0), None),
        "left_out": (schema.text(most=_LINE_BYTES), None),
        "wrong": (schema.boolean(), None),
    },
    more=True,
)


class Journal:
    """Facts by key, in memory and in a file that one process at a time holds open.

    Args:
        path: created if missing.
        fresh: start a new file; an old file is kept as ``{name}.old``.

    Attributes:
        skipped: lines that were not understood, or damaged; a half-written last line, cut off, counts as one.

    Raises:
        ConfigError: the file cannot be written, is no regular file or larger than `JOURNAL_BYTES`, or another process
            is tuning with it.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.skipped = 0
        self._facts: dict[str, dict[str, Any]] = {}
        self._handle = -1
        try:
            make_directory(path.parent)
            self._handle = self._open(fresh)
            self._read()
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError) or not isinstance(error, (OSError, ValueError)):
                raise
            raise ConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error

    def _open(self, fresh: bool) -> int:
        handle = self._locked()
        if fresh and os.fstat(handle).st_size:
            try:
                self.path.replace(self.path.with_name(self.path.name + ".old"))
                return self._locked()
            finally:
                os.close(handle)  # The lock of the old file goes with it, once the new one is held.
        return handle

    def _locked(self) -> int:
        known = self.path.exists()
        # A pipe or a device must not be waited for.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        handle = os.open(self.path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{self.path}: not a regular file; a pipe or device is no journal")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(f"{self.path}: another process is tuning this GPU; wait for it to end") from None
        except BaseException:
            os.close(handle)
            raise
        if not known:
            flush_directory(self.path.parent)
        return handle

    def _read(self) -> None:
        size = os.fstat(self._handle).st_size
        if size > JOURNAL_BYTES:
            raise ConfigError(
                f"{self.path}: found {size} bytes; at most {JOURNAL_BYTES} are read: begin a fresh journal"
            )
        data = bytearray()
        while piece := os.pread(self._handle, 1 << 24, len(data)):
            data += piece
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self.skipped += 1
            os.ftruncate(self._handle, whole)
        for line in bytes(data[:whole]).splitlines():
            try:
                fact = self._parse(line)
            except ConfigError:
                self.skipped += 1
            else:
                self._facts[fact["key"]] = fact

    def _parse(self, line: bytes) -> dict[str, Any]:
        if len(line) > _LINE_BYTES:
            raise ConfigError(f"{self.path}: a line of {len(line)} bytes; allowed: {_LINE_BYTES}")
        fact: dict[str, Any] = parse_json(line, self.path, ConfigError)
        schema.conform(fact, _FACT, self.path, ConfigError)
        checksum = fact.pop(_CHECKSUM, None)
        if (checksum is not None and checksum != _checksum(fact)) or not fact.keys() & {"us", "left_out"}:
            raise ConfigError(f"{self.path}: a damaged line of {fact['key']!r}")
        return fact

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The facts recorded last under a key, or None."""
        return self._facts.get(key)

    def add(self, key: str, **facts: Any) -> None:
        """Record facts, and return once they are on disk.

        Raises:
            ConfigError: they cannot be written, or are no JSON. The file is then as before.
        """
        fact = {"key": key, **facts}
        try:
            line = json.dumps({**fact, _CHECKSUM: _checksum(fact)}, allow_nan=False).encode() + b"\n"
            size = os.fstat(self._handle).st_size
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
                os.fsync(self._handle)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, size)
                raise
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
        self._facts[key] = fact

    def close(self) -> None:
        """Close the file, so that another process may open it."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            with contextlib.suppress(OSError):
                os.close(handle)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _checksum(fact: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fact, sort_keys=True, allow_nan=False).encode())
