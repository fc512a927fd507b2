"""What a command answers: text for people, or with ``--json`` one object for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

SCHEMA_VERSION = 1
"""Raised when a field of an answer is renamed, goes, or changes its meaning; new fields do not raise it."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a command.

    Attributes:
        data: fields of the JSON object, those that the command's parser lists under ``fields``.
        text: what is printed without ``--json``; empty where the command has printed its text already.
        status: exit status.
    """

    data: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    status: int = 0


def write_json(stream: TextIO, name: str, status: int, data: Mapping[str, Any]) -> None:
    """Write one JSON object and a newline.

    Args:
        stream: where to.
        name: the command's, or ``error``.
        status: exit status.
        data: the other fields. Numbers that are not finite become null.
    """
    answer = {"schema": f"qcut.{name}/{SCHEMA_VERSION}", "status": status, **data}
    stream.write(json.dumps(_finite(answer), allow_nan=False) + "\n")
    stream.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
