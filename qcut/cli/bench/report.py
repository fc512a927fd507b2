"""Rows of ``qcut bench``, the rule that recommends one of them, and their table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

TIE = 0.02
"""Speeds, or sizes, that differ by less than this share are equal to the rule."""
WIDTH = 100
"""Columns of a terminal that lines of text fill."""
_REASON = 200
"""Most characters of a reason in the table."""


@dataclass(frozen=True)
class Row:
    """One scheme. Numbers that were not measured are NaN.

    Attributes:
        scheme: its name; of a float model its dtype.
        error: why it could not be measured; empty if it was.
        runs_on: ``qcut``, its engine, or ``transformers``.
        first_token_ms: median milliseconds from a prompt of one sequence to its first token.
        tokens_per_s: new tokens a second after the first one, of all sequences together, by their number.
        weight_bytes: bytes of parameters and buffers, tied ones once.
        peak_bytes: most bytes of the GPU's memory while prompts were read and continued; None on a CPU.
        perplexity: on the text.
        change: relative increase of the perplexity over that of the reference; see `compared`.
        load_s: seconds of loading and quantizing.
        warm_up_s: seconds of all first calls, which build kernels and capture graphs.
    """

    scheme: str
    error: str = ""
    runs_on: str = ""
    first_token_ms: float = math.nan
    tokens_per_s: Mapping[int, float] = field(default_factory=dict)
    weight_bytes: int = 0
    peak_bytes: int | None = None
    perplexity: float = math.nan
    change: float = math.nan
    load_s: float = math.nan
    warm_up_s: float = math.nan


@dataclass(frozen=True)
class Recommendation:
    """The row to take.

    Attributes:
        scheme: of the row.
        by: ``speed`` or ``memory``.
        prompts: scheme with the shortest time to the first token; None by memory.
        batches: fastest scheme by number of sequences; empty by memory.
        text: the reason, in lines.
    """

    scheme: str
    by: str
    prompts: str | None
    batches: dict[int, str]
    text: str


def compared(rows: Sequence[Row]) -> tuple[list[Row], str | None]:
    """Rows with their change of perplexity, and the scheme that it is relative to.

    That is the first row, the float model. If that has no finite perplexity, it is the row with the least one; None if
    there is no such row.
    """
    finite = [row for row in rows if math.isfinite(row.perplexity)]
    if not finite:
        return list(rows), None
    reference = rows[0] if rows[0] in finite else min(finite, key=lambda row: row.perplexity)
    found = [replace(row, change=row.perplexity / reference.perplexity - 1) for row in rows]
    return found, reference.scheme


def recommend(rows: Sequence[Row], reference: str | None, budget: float, *, by_speed: bool) -> Recommendation | None:
    """Choose among the rows with a change of perplexity within the budget.

    By speed it is the fastest with the smallest number of sequences; of those within `TIE` of its speed, the one with
    the least weights. The time to the first token and the larger numbers of sequences are judged likewise. By memory it
    is the row with the least weights; of those within `TIE` of its size, the one with the least change.

    Args:
        rows: of `compared`.
        reference: of `compared`.
        budget: allowed change.
        by_speed: whether speeds count.

    Returns:
        The recommendation; None without a reference.
    """
    within = [row for row in rows if row.change <= budget]
    if reference is None or not within:
        return None
    beyond = [row for row in rows if not row.error and not row.change <= budget]
    if not by_speed:
        least = min(row.weight_bytes for row in within)
        near = [row for row in within if row.weight_bytes <= least * (1 + TIE)]
        chosen = min(near, key=lambda row: row.change)
        size = f"{_number(chosen.weight_bytes / 1e6)} MB of weights"
        text = f"{chosen.scheme}: least memory, {size}{_loss(chosen, reference)}"
        return Recommendation(chosen.scheme, "memory", None, {}, _with_beyond(text, beyond, budget))
    batches = sorted(within[0].tokens_per_s)
    fastest = {batch: _fastest(within, [row.tokens_per_s[batch] for row in within]) for batch in batches}
    chosen = fastest[batches[0]]
    prompts = _fastest(within, [1 / row.first_token_ms for row in within])
    lines = [f"{chosen.scheme}: fastest at batch {batches[0]}, {_rate(chosen, batches[0])}{_loss(chosen, reference)}"]
    if prompts is not chosen:
        times = [f"{_number(row.first_token_ms)} ms" for row in (prompts, chosen)]
        lines.append(f"{prompts.scheme} for prompts: first token after {times[0]}, {chosen.scheme} {times[1]}")
    for batch, row in fastest.items():
        if row is not chosen:
            lines.append(f"{row.scheme} at batch {batch}: {_rate(row, batch)}, {chosen.scheme} {_rate(chosen, batch)}")
    names = {batch: row.scheme for batch, row in fastest.items()}
    text = _with_beyond("\n".join(lines), beyond, budget)
    return Recommendation(chosen.scheme, "speed", prompts.scheme, names, text)


def _fastest(rows: Sequence[Row], speeds: Sequence[float]) -> Row:
    """The row of the least weights among those within `TIE` of the highest speed; NaN is the lowest."""
    known = [speed if math.isfinite(speed) else 0.0 for speed in speeds]
    near = [row for row, speed in zip(rows, known, strict=True) if speed >= max(known) * (1 - TIE)]
    return min(near, key=lambda row: row.weight_bytes)


def _loss(row: Row, reference: str) -> str:
    if row.scheme == reference:
        return ""
    return f", with {abs(row.change):.2%} {'more' if row.change >= 0 else 'less'} perplexity".replace("%", " %")


def _rate(row: Row, batch: int) -> str:
    return f"{_number(row.tokens_per_s[batch])} tokens/s"


def _with_beyond(text: str, beyond: Sequence[Row], budget: float) -> str:
    if not beyond:
        return text
    names = ", ".join(f"{row.scheme} ({_change(row)})" for row in beyond)
    return f"{text}\nbeyond the budget of {100 * budget:g} %: {names}; `qcut plan` mixes schemes within a budget"


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def table(rows: Sequence[Row], reference: str | None) -> str:
    """One line a row; a row that was not measured has the reason in place of numbers.

    The memory's peak and the seconds of building are columns if any row has a peak, which is so on a GPU.
    """
    measured = [row for row in rows if not row.error]
    batches = sorted({batch for row in measured for batch in row.tokens_per_s})
    on_gpu = any(row.peak_bytes is not None for row in measured)
    head = ["scheme", "1st ms", *(f"tok/s x{batch}" for batch in batches), "model MB"]
    head += ["peak MB"] * on_gpu + ["perplexity", "change", "load s"] + ["build s"] * on_gpu
    cells = {row.scheme: _cells(row, batches, on_gpu, reference) for row in measured}
    columns = list(zip(head, *cells.values(), strict=True))
    widths = [max(map(len, column)) for column in columns]
    widths[0] = max(widths[0], *(len(row.scheme) for row in rows))
    lines = [_line(head, widths)]
    for row in rows:
        if row.error:
            why = textwrap.shorten(row.error, _REASON, placeholder=" …")
            lines += wrapped(f"{row.scheme:<{widths[0]}}  not measured: {why}", " " * (widths[0] + 2))
        else:
            lines.append(_line(cells[row.scheme], widths))
    return "\n".join(lines)


def _cells(row: Row, batches: Sequence[int], on_gpu: bool, reference: str | None) -> list[str]:
    cells = [row.scheme, _number(row.first_token_ms), *(_number(row.tokens_per_s[batch]) for batch in batches)]
    cells.append(_number(row.weight_bytes / 1e6))
    if on_gpu:
        cells.append("-" if row.peak_bytes is None else _number(row.peak_bytes / 1e6))
    cells.append(f"{row.perplexity:.3f}" if row.perplexity < 1e4 else f"{row.perplexity:.4g}")
    cells += ["" if row.scheme == reference else _change(row), _number(row.load_s)]
    return cells + [_number(row.warm_up_s)] * on_gpu


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    right = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join((f"{cells[0]:<{widths[0]}}", *right)).rstrip()


def _change(row: Row) -> str:
    return f"{100 * row.change:+.2f} %" if math.isfinite(row.change) else "-"


def _number(value: float) -> str:
    """Three or four digits of a number; all digits in front of the point."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most `WIDTH` columns; those after the first are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
