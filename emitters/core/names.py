"""Procedural names: the names of kernels in the cache, in logs, in tables and in benchmarks."""

from __future__ import annotations

from typing import Protocol


class Named(Protocol):
    """A problem, or a tile, of any family."""

    @property
    def name(self) -> str:
        """The problem's or the tile's part of a kernel's name."""


def procedural_name(family: str, arch: str, problem: Named, tile: Named) -> str:
    """``qcut_{family}_{arch}_{problem}_{tile}``, the architecture without its underscore."""
    return f"qcut_{family}_{arch.replace('_', '')}_{problem.name}_{tile.name}"
