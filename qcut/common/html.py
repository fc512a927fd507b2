"""Results as notebooks show them: lines of text and a table, without scripts, styles or files from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MOST_ROWS = 50
"""Rows of a table that are shown; a last row counts the others."""


def html_table(text: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, most: int = MOST_ROWS) -> str:
    """An HTML element for `_repr_html_`; every text in it is escaped.

    Args:
        text: lines above the table.
        head: titles of the columns.
        rows: a text for each column. The first one names the row. A column is aligned right if its text in the first
            row begins with a digit.
        most: number of rows that are shown.
    """
    every = list(rows)
    above = f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'
    if not every:
        return f"<div>{above}</div>"
    sides = [_LEFT, *(_RIGHT if text[:1].isdigit() else _LEFT for text in every[0][1:])]
    titles = "".join(f'<th scope="col" {side}>{escape(title)}</th>' for title, side in zip(head, sides, strict=True))
    body = [_row(row, sides) for row in every[:most]]
    if len(every) > most:
        body.append(f'<tr><td colspan="{len(head)}" {_LEFT}>… {len(every) - most} more</td></tr>')
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div style="overflow-x: auto">{above}{table}</div>'


_LEFT = 'style="text-align: left; padding: 0 0.5em"'
_RIGHT = 'style="text-align: right; padding: 0 0.5em; white-space: nowrap"'


def _row(texts: Sequence[str], sides: Sequence[str]) -> str:
    cells = [f"<td {side}>{escape(text)}</td>" for text, side in zip(texts[1:], sides[1:], strict=True)]
    return f'<tr><th scope="row" {_LEFT}>{escape(texts[0])}</th>{"".join(cells)}</tr>'
