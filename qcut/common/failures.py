"""Tells failures of other people's code from what ends the program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from qcut.errors import QcutError


def is_interrupt(error: BaseException) -> bool:
    """Whether the program is being ended: Ctrl-C and the exit at a signal reach only the main thread.

    Panics of code in Rust, and exits in other threads, are failures, though they are no `Exception`.
    """
    return isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread()


def is_memory(error: BaseException) -> bool:
    """Whether an allocation failed on the host; torch raises a plain `RuntimeError` there."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def line_of(error: BaseException, most: int = 300) -> str:
    """An exception's message in one line, cut to a number of characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


@contextmanager
def failures_as(kind: type[QcutError], what: str) -> Iterator[None]:
    """Turn whatever other libraries raise in a block into an error of one line; qcut's own errors pass.

    Args:
        kind: class of the error to raise.
        what: what fails, for the message.
    """
    try:
        yield
    except BaseException as error:  # transformers, tokenizers, safetensors and the hub have dozens of kinds
        if is_interrupt(error) or isinstance(error, QcutError):
            raise
        raise kind(f"{what}: {line_of(error, 600)}") from error
