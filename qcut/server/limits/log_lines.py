"""A log filter that limits repeated lines, so that a flood of requests does not flood the log."""

from __future__ import annotations

import logging
import threading
from time import monotonic


class LogLimit(logging.Filter):
    """Passes the first warnings and errors of each kind in a period, and counts the rest; lower levels always pass.

    Lines with the same format and level are of one kind. The first line of the next period has the number of lines
    dropped before.

    Args:
        most: lines of a kind per period.
        period_s: length of a period in seconds.
    """

    KINDS = 256
    """Most kinds that are counted separately; beyond them counting starts again."""

    def __init__(self, most: int = 250, period_s: float = 60) -> None:
        super().__init__()
        self._most, self._period_s = most, period_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.levelno, str(record.msg)[:200]), monotonic()
        with self._lock:
            since, count = self._kinds.get(kind, (now, 0))
            left_out = 0
            if now - since >= self._period_s:
                since, count, left_out = now, 0, max(0, count - self._most)
            if len(self._kinds) >= self.KINDS and kind not in self._kinds:
                self._kinds.clear()
            self._kinds[kind] = since, count + 1
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out:,} lines like this were left out)", None
        return count < self._most
