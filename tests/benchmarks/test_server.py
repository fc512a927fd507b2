"""The benchmark of the server on the CPU, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from benchmarks import bench_server
from benchmarks.bench_batching import Answer
from benchmarks.harness import read_rows

TINY = ["--case", "tiny-llama", "--device", "cpu", "--clients", "3", "--rounds", "2", "--new", "6", "--lengths", "4,20"]


def test_a_load_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_server.main([*TINY, "--chunk", "8", "--out", str(tmp_path)]) == 0
    assert "3 clients of HTTP, 6 prompts" in capsys.readouterr().out
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench_server.csv")}
    assert list(rows) == ["server", "scheduler", "first token", "gap"]
    assert float(rows["server"]["tokens_s"]) > 0
    assert float(rows["gap"]["p99_us"]) >= float(rows["gap"]["median_us"]) >= 0
    assert float(rows["first token"]["median_us"]) > 0


def test_answers_that_are_lost_or_wrong_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_server, "load", lambda *_: (1.0, []))

    def over_http(port: int, prompts: Any, clients: int, new: int) -> tuple[float, list[Answer]]:
        return 1.0, [Answer([95] * new, [0.0] * (new + 1))] * len(prompts)

    monkeypatch.setattr(bench_server, "over_http", over_http)
    assert bench_server.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "deviations less likely than the engine's" in capsys.readouterr().out
