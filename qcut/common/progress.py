"""Progress on standard error: bars on a terminal, now and then a line elsewhere.

Progress that is not shown is no bar at all: it takes no lock and starts no thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

FIRST_LINE_S = 10.0
"""Seconds of work before the first line of progress in a file; each further line comes after twice the time."""


class Advance(Protocol):
    """A function that moves a bar on."""

    def __call__(self, done: int, now: str = "") -> object:
        """Add to what is done, and name what is worked on ``now``, if that is given."""


@functools.cache
def _bar_class() -> type[Any]:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

    # tqdm's own lock is shared with forked processes, and stays taken if one of them dies with it.
    Bar.set_lock(threading.RLock())
    return Bar


if hasattr(os, "register_at_fork"):
    # A lock that another thread held at the fork stays taken in the child, which makes a class with a free one.
    os.register_at_fork(after_in_child=_bar_class.cache_clear)


@contextlib.contextmanager
def progress_bar(total: int | None, what: str, unit: str, *, shown: bool) -> Iterator[Advance]:
    """Show how much of a piece of work is done, until the block ends.

    A terminal and a notebook get a bar. A file gets lines without control characters, the first after `FIRST_LINE_S`.

    Args:
        total: how much there is to do; None: unknown.
        what: the work, in a word or two.
        unit: what is counted.
        shown: False: nothing is printed.

    Yields:
        A function that adds to what is done, for any thread.
    """
    if not shown:
        yield lambda done, now="": None
        return
    if not _draws_bars():
        yield _Lines(total, what, unit)
        return
    with _bar_class()(total=total, desc=what, unit=unit, leave=False) as bar:

        def advance(done: int, now: str = "") -> None:
            if now:
                bar.set_postfix_str(now, refresh=not done)
            bar.update(done)

        yield advance


class _Lines:
    """Progress in a file: a line where work takes long."""

    def __init__(self, total: int | None, what: str, unit: str) -> None:
        self._of, self._what, self._unit = "" if total is None else f" of {total}", what, unit
        self._done, self._start, self._next = 0, time.monotonic(), FIRST_LINE_S

    def __call__(self, done: int, now: str = "") -> None:
        self._done += done
        passed = time.monotonic() - self._start
        if passed >= self._next:
            self._next = 2 * passed
            print(f"{self._what}: {self._unit} {self._done}{self._of}, {passed:.0f} s", file=sys.stderr)


def _draws_bars() -> bool:
    stream = sys.stderr
    try:
        return stream is not None and (stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel")
    except ValueError:  # closed
        return False


def with_progress(items: Iterable[T], what: str, unit: str, *, shown: bool) -> Iterator[T]:
    """Yield the items, and show how many are done; see `progress_bar`."""
    total = len(items) if isinstance(items, Sized) else None
    with progress_bar(total, what, unit, shown=shown) as advance:
        for item in items:
            yield item
            advance(1)


def print_above(line: str) -> None:
    """Print a line on standard error, above the bars that are shown."""
    if _draws_bars():
        _bar_class().write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr)
