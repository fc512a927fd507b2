"""Tells those who asked for it which models hold quantized layers now."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_listeners: dict[str, Callable[[nn.Module], None]] = {}


def on_quantized(name: str, listener: Callable[[nn.Module], None]) -> None:
    """Call a function with each model that is quantized, or loaded quantized, from now on.

    Args:
        name: of the listener; one of the same name takes the place of the earlier one.
        listener: must not fail, and must not hold the model.
    """
    _listeners[name] = listener


def announce(model: nn.Module) -> None:
    """Tell all listeners of a model that holds quantized layers now."""
    for listener in tuple(_listeners.values()):
        listener(model)
