"""Windows of attention: how far back the tokens of a layer see."""

from __future__ import annotations

from typing import Any


def window_of(attention: Any) -> int:
    """Places that a token of a layer sees, its own the last; 0: all.

    Args:
        attention: transformers' module. Its own window counts, then that of its configuration.
    """
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return 0 if window is None else int(window)
