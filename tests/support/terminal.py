"""Standard error as programs find it on a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True
