"""The benchmark of continuous batching on the CPU, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_batching
from benchmarks.harness import read_rows

TINY = ["--case", "tiny-llama", "--device", "cpu", "--clients", "3", "--rounds", "2", "--new", "6", "--lengths", "4,20"]


def test_a_load_is_answered_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_batching.main([*TINY, "--chunk", "8", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "3 clients, 6 prompts" in said
    assert "of a static batch's" in said
    assert "20 tokens, when a sequence leaves" in said
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench_batching.csv")}
    assert list(rows) == ["continuous", "static", "row copied", "gap"]
    assert float(rows["continuous"]["tokens_s"]) > 0
    assert float(rows["gap"]["p99_us"]) >= float(rows["gap"]["median_us"]) > 0


def test_other_answers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench_batching.check

    def other(engine: Any, prompts: Any, answers: Any) -> None:
        right(engine, prompts, answers[1:] + answers[:1])

    monkeypatch.setattr(bench_batching, "check", other)
    assert bench_batching.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "deviations less likely than the engine's" in capsys.readouterr().out


def test_prompts_spread_evenly() -> None:
    prompts = bench_batching.prompts_of(5, 10, 4, 20)
    assert sorted(map(len, prompts)) == [4, 8, 12, 16, 20]
    assert all(0 <= token < 10 for prompt in prompts for token in prompt)
