"""Defines operators of ``torch.ops.qcut`` while others may look for them.

torch asks the namespace for an operator before it defines it, and the namespace imports modules of missing ones.
"""

from __future__ import annotations

import threading

import torch


class _Current(threading.local):
    name = ""


_current = _Current()


def is_defining(name: str) -> bool:
    """Whether this thread is about to define the operator."""
    return _current.name == name


def define(library: torch.library.Library, name: str, schema: str) -> None:
    """Define an operator by its schema in a library."""
    _current.name = name
    try:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    finally:
        _current.name = ""
