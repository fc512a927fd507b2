"""Tells failures of other people's code from what ends the program."""

from __future__ import annotations

import threading


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody ends the program: Ctrl-C and the exit at a signal reach only the main thread.

    Panics of code in Rust, and exits in other threads, are failures, though they are no `Exception`.
    """
    return isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread()


def line_of(error: BaseException) -> str:
    """What an exception says, in a line of at most 300 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
