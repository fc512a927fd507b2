"""Figures and tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MISSING = "–"


def us(value: float | None) -> str:
    """Microseconds with one decimal, and none from 100 on; a dash for None."""
    return MISSING if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def figures(value: float | None) -> str:
    """Three significant figures, to compare values of a few microseconds; a dash for None."""
    return us(value) if value is None or value >= 9.995 else f"{value:.2f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
