"""The README's measured tables are those of the rows in benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import readme_tables

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("table", readme_tables.TABLES, ids=lambda t: t.__name__)
def test_readme_prints_the_measured_rows(table):
    text = table()
    assert len(text.splitlines()) > 5
    assert text in (ROOT / "README.md").read_text(), "run `python -m benchmarks.readme_tables` and paste what changed"


def test_times_print_three_figures():
    assert [readme_tables.us(v) for v in (3.04, 99.9, 99.96, 101.4, None)] == ["3.0", "99.9", "100", "101", "–"]
