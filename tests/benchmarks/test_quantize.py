"""The quantization benchmark on the CPU, whole, at its smallest size."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import bench_quantize


def test_every_scheme_and_fit_gets_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--schemes", "codebook4,int4", "--fits", "nearest"]
    assert bench_quantize.main([*arguments, "--out", str(tmp_path)]) == 0
    with (tmp_path / "bench_quantize.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["scheme"], row["fit"]) for row in rows] == [("codebook4", "nearest"), ("int4", "nearest")]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert "codebook4" in capsys.readouterr().out


def test_fitting_takes_the_moments(tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--schemes", "codebook4", "--fits", "fitted"]
    assert bench_quantize.main([*arguments, "--out", str(tmp_path)]) == 0
    with (tmp_path / "bench_quantize.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["scheme"], row["fit"]) == ("codebook4", "fitted")
