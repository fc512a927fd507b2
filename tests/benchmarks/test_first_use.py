"""The benchmark of the first use on the CPU, whole, at its smallest size."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench_first_use


def test_a_process_of_its_own_reports_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_first_use.main(["--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    with (tmp_path / "bench_first_use.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    times = ("quantize_s", "engine_s", "prompt_s", "longest_wait_s", "total_s", "take_over_s")
    assert all(float(row[name]) >= 0 for name in times)
    parts = sum(float(row[name]) for name in times[:3])
    assert parts <= float(row["total_s"]) + 0.005
    assert float(row["prompt_s"]) <= float(row["longest_wait_s"]) + 0.005
    assert (row["build"], row["scheme"]) == ("background", "w8a8")
    assert "longest_wait_s" in capsys.readouterr().out


def test_cpu_seconds_of_a_process_grow_with_its_work() -> None:
    short, long = (bench_first_use.cpu_seconds(f"sum(range({count}))") for count in (10, 20_000_000))
    assert 0 < short < long
    with pytest.raises(subprocess.CalledProcessError):
        bench_first_use.cpu_seconds("raise SystemExit(3)")
