"""A journal of a tuner's measurements: JSON lines, each written to disk before the next measurement.

A run that is killed loses the measurement in progress. The next run reads the journal and repeats no measurement.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcut.errors import ConfigError


class Journal:
    """Facts by key, in memory and in a file that one process at a time holds open.

    Args:
        path: created if missing.
        fresh: start a new file; an old file is kept as ``{name}.old``.

    Attributes:
        skipped: lines that were not understood; a half-written last line, cut off, counts as one.

    Raises:
        ConfigError: the file cannot be written, or another process is tuning with it.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.skipped = 0
        self._facts: dict[str, dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open(fresh)
            self._read()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error

    def _open(self, fresh: bool) -> Any:
        file = self._locked()
        if fresh and os.fstat(file.fileno()).st_size:
            self.path.replace(self.path.with_name(self.path.name + ".old"))
            with file:  # The lock of the old file goes with it, once the new one is held.
                return self._locked()
        return file

    def _locked(self) -> Any:
        file = open(self.path, "a+b")  # noqa: SIM115 -- held until `close`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"{self.path}: another process is tuning this GPU; wait for it to end") from None
            raise
        return file

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self.skipped += 1
            self._file.truncate(whole)
        for line in data[:whole].splitlines():
            try:
                fact = json.loads(line)
                self._facts[str(fact["key"])] = dict(fact)
            except (ValueError, KeyError, TypeError):
                self.skipped += 1

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The facts recorded last under a key, or None."""
        return self._facts.get(key)

    def add(self, key: str, **facts: Any) -> None:
        """Record facts, and return once they are on disk."""
        fact = {"key": key, **facts}
        self._file.write(json.dumps(fact, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._facts[key] = fact

    def close(self) -> None:
        """Close the file, so that another process may open it."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
