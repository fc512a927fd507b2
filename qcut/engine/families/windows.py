"""Windows of attention: how far back the tokens of a layer see."""

from __future__ import annotations

from typing import Any

_BY_CONFIGURATION = ("mistral", "phi3", "starcoder2")
"""Models whose windows are only in their configurations; others without windows of layers pass an entry there over."""


def window_of(attention: Any) -> int:
    """Places that a token of a layer sees, its own the last; 0: all.

    Args:
        attention: transformers' module. Its own window counts, then that of its configuration.
    """
    window = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type in _BY_CONFIGURATION:
        window = attention.config.sliding_window
    return 0 if window is None else int(window)
