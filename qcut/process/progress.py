"""Progress bars on standard error. One that is not shown is no bar at all: it takes no lock and starts no thread."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Advance(Protocol):
    """A function that moves a bar on."""

    def __call__(self, done: int, now: str = "") -> object:
        """Add to what is done, and name what is worked on ``now``, if that is given."""


@functools.cache
def _bar_class() -> type[Any]:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

    # tqdm's own lock is shared with forked processes, and stays taken where one of them dies with it.
    Bar.set_lock(threading.RLock())
    return Bar


if hasattr(os, "register_at_fork"):
    # A lock that another thread held at the fork stays taken in the child, which makes a class with a free one.
    os.register_at_fork(after_in_child=_bar_class.cache_clear)


@contextlib.contextmanager
def progress_bar(total: int | None, what: str, unit: str, *, shown: bool) -> Iterator[Advance]:
    """Show how much of a piece of work is done, until the block ends.

    Args:
        total: how much there is to do; None: nobody knows.
        what: the work, in a word or two.
        unit: what is counted.
        shown: False: nothing is printed, and tqdm is not touched.

    Yields:
        A function that adds to what is done, for any thread.
    """
    if not shown:
        yield lambda done, now="": None
        return
    with _bar_class()(total=total, desc=what, unit=unit, leave=False) as bar:

        def advance(done: int, now: str = "") -> None:
            if now:
                bar.set_postfix_str(now, refresh=not done)
            bar.update(done)

        yield advance


def with_progress(items: Iterable[T], what: str, unit: str, *, shown: bool) -> Iterator[T]:
    """Yield the items, and show how many are done; see `progress_bar`."""
    total = len(items) if isinstance(items, Sized) else None
    with progress_bar(total, what, unit, shown=shown) as advance:
        for item in items:
            yield item
            advance(1)


def print_above(line: str) -> None:
    """Print a line on standard error, above the bars that are shown."""
    if sys.stderr.isatty():
        _bar_class().write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr)
