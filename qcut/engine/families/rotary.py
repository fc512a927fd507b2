"""Rotary positions, as far as the engine's kernels turn by them."""

from __future__ import annotations

from typing import Any

from torch import nn

from qcut.errors import UnsupportedError

_TYPES = ("default", "linear", "llama3", "yarn")  # of the others, frequencies depend on the length


def rotary_of(model: Any, head_size: int) -> nn.Module:
    """The module that makes cosines and sines of a model's positions.

    Args:
        model: a causal language model whose ``model`` has ``rotary_emb``.
        head_size: columns of a head.

    Raises:
        UnsupportedError: frequencies that depend on the length, or rotations of a part of each head.
    """
    rotary: nn.Module = model.model.rotary_emb
    name, kind = type(model).__name__, getattr(rotary, "rope_type", "default")
    if kind not in _TYPES:
        raise UnsupportedError(f"{name}: rotary positions of type {kind!r}; allowed: {', '.join(_TYPES)}")
    turned = 2 * rotary.inv_freq.numel()  # type: ignore[operator, union-attr]
    if turned != head_size:
        raise UnsupportedError(f"{name}: rotary positions of {turned} of a head's {head_size} columns; allowed: of all")
    return rotary
