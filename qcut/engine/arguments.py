"""What callers of the engine pass as token ids: lists, arrays or tensors become tensors, and text is refused."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, ShapeError

_TOKENS = "token ids, as tokenizer(text)['input_ids'] has them"


def listed_prompts(prompts: Any) -> list[Any]:
    """Prompts as a list, from whatever holds rows of token ids.

    Raises:
        DtypeError: text, a mapping, or nothing that holds rows.
        ShapeError: one list of token ids.
    """
    if isinstance(prompts, str | bytes):
        raise DtypeError(f"prompts are text, {prompts[:40]!r}; allowed: a list of prompts, each a list of {_TOKENS}")
    if isinstance(prompts, Mapping):
        raise DtypeError(f"prompts are a {type(prompts).__name__}; allowed: a list of lists of {_TOKENS}")
    try:
        rows = list(prompts)
    except TypeError:
        raise DtypeError(f"prompts are a {type(prompts).__name__}; allowed: a list of lists of {_TOKENS}") from None
    if rows and all(is_whole(row) for row in rows):
        raise ShapeError("prompts are one list of token ids; allowed: a list of such lists, [ids] for one prompt")
    return rows


def token_row(row: Any, index: int | None) -> Tensor:
    """Token ids ``[T]`` of one prompt, or of one step where ``index`` is None.

    Raises:
        DtypeError: text, or no list of numbers.
        ShapeError: rows within rows.
    """
    what = "tokens are" if index is None else f"prompt {index} is"
    if isinstance(row, str | bytes):
        raise DtypeError(f"{what} text, {row[:40]!r}; allowed: {_TOKENS}")
    try:
        ids = torch.as_tensor(row if isinstance(row, Tensor) or hasattr(row, "__array__") else list(row))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{what} no list of integers ({error}); allowed: {_TOKENS}") from None
    if ids.dim() != 1:
        raise ShapeError(f"{what} of shape {list(ids.shape)}; allowed: [T]")
    return ids if ids.numel() else ids.long()


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of Python, numpy or another kind, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def stop_ids(stop: Any) -> frozenset[int]:
    """Ids that end a sequence, from any collection of whole numbers.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(stop, Tensor):
        stop = stop.flatten().tolist()
    try:
        ids = list(stop)
    except TypeError:
        ids = [stop]
        if is_whole(stop):
            raise ConfigError(f"stop is {stop!r}; allowed: a list of token ids, [{stop!r}] for one") from None
    if isinstance(stop, str | bytes) or not all(map(is_whole, ids)):
        raise ConfigError(f"stop is {stop!r}; allowed: a list of {_TOKENS}")
    return frozenset(int(token) for token in ids)
