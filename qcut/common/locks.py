"""Locks that a fork leaves free, and functions that threads compute once."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

FORK_TIMEOUT_S = 60.0
"""Seconds that a fork waits for locks with ``fork_waits``."""


class Lock:
    """A reentrant lock of threads, with the methods of `threading.RLock`.

    In a forked child the lock is free, whichever thread held it; but a thread that forks while it holds the lock holds
    it in the child too.

    Args:
        fork_waits: a fork waits until no other thread holds the lock, a minute at most: for work that a child can
            neither continue nor begin anew, such as an import.
    """

    def __init__(self, *, fork_waits: bool = False) -> None:
        self._lock, self._fork_waits = threading.RLock(), fork_waits
        self._forking: int | None = None  # the thread that holds the lock while it forks
        _locks.append(weakref.ref(self, _locks.remove))

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.RLock`."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """See `threading.RLock`."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _before_fork(self) -> None:
        if self._fork_waits and self._lock.acquire(timeout=FORK_TIMEOUT_S):
            self._forking = threading.get_ident()

    def _after_fork(self) -> None:
        if self._forking == threading.get_ident():
            self._forking = None
            self._lock.release()

    def _in_child(self) -> None:
        self._after_fork()
        # The threads that held it do not exist in the child, and would never let go of it.
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


class Section:
    """Work that any number of threads may do at a time, and that a fork waits for, a minute at most.

    For calls of libraries with locks of their own: a child that is forked in the middle of another thread's call finds
    them held for ever. ``with`` surrounds the work.
    """

    def __init__(self) -> None:
        self._changed, self._inside = threading.Condition(), list[int]()
        self._forking: int | None = None
        _locks.append(weakref.ref(self, _locks.remove))

    def __enter__(self) -> None:
        with self._changed:
            self._inside.append(threading.get_ident())

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._inside.remove(threading.get_ident())
            self._changed.notify_all()

    def _before_fork(self) -> None:
        self._changed.acquire()  # nobody enters before the fork is made
        own = threading.get_ident()
        self._changed.wait_for(lambda: set(self._inside) <= {own}, FORK_TIMEOUT_S)
        self._forking = own

    def _after_fork(self) -> None:
        if self._forking == threading.get_ident():
            self._forking = None
            self._changed.release()

    def _in_child(self) -> None:
        self._forking, own = None, threading.get_ident()
        self._changed, self._inside = threading.Condition(), [thread for thread in self._inside if thread == own]


# A list's copy is made in one step, whatever threads make meanwhile.
_locks: list[weakref.ref[Lock] | weakref.ref[Section]] = []


def _each(step: str) -> Callable[[], None]:
    def run() -> None:
        for reference in list(_locks):
            if (lock := reference()) is not None:
                getattr(lock, step)()

    return run


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_each("_before_fork"), after_in_parent=_each("_after_fork"), after_in_child=_each("_in_child")
    )


class Once(Generic[P, R]):
    """A function made by `once`."""

    def __init__(self, function: Callable[P, R], lock: Lock) -> None:
        self._function, self._lock = function, lock
        self._results: dict[Hashable, R] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The remembered result, or the function's."""
        key = (args, tuple(kwargs.items())) if kwargs else args
        try:
            return self._results[key]
        except KeyError:
            pass
        with self._lock:
            if key not in self._results:
                self._results[key] = self._function(*args, **kwargs)
            return self._results[key]

    def cache_clear(self) -> None:
        """Forget the results, so that the next call computes again."""
        with self._lock:
            self._results.clear()


def once(function: Callable[P, R]) -> Once[P, R]:
    """Decorate a function of hashable arguments: it computes once for each, and remembers the result.

    Other than under `functools.cache`, threads that call at the same time wait for one computation. A call that raises
    is not remembered. ``cache_clear`` forgets all results.
    """
    return Once(function, Lock())


_imports = Lock(fork_waits=True)  # one for all, which call each other: a fork could not take several in their order


def imports_once(function: Callable[P, R]) -> Once[P, R]:
    """Decorate as `once` a function that imports modules or loads libraries: a fork waits until it has ended.

    A child that is forked in the middle of another thread's import would wait for that import for ever.
    """
    return Once(function, _imports)
