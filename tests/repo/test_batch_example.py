"""`examples/batch.py`: lines of its files that are not as they must be, and a line that a killed process left."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import batch


def test_an_unfinished_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": 1, "text": "a"}\n{"id": "two", "text": "b"}\n{"id": 3, "te')
    assert batch.answered(path) == {1, "two"}
    assert path.read_text().endswith('"b"}\n')


@pytest.mark.parametrize("line", ["{", "[]", "1", "null", "", '{"text": "a"}', '{"id": [1], "text": "a"}', "[" * 10**5])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(f'{{"id": 1, "text": "a"}}\n{line}\n')
    with pytest.raises(SystemExit, match=r"answers\.jsonl, line 2: found .*; allowed: an object with id, text"):
        batch.answered(path)
