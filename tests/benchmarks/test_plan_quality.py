"""The benchmark of plans within bits, on the embedded checkpoint and a CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import demo, plan_quality

pytest.importorskip("transformers", reason="the benchmark needs the hf extra")


def test_a_plan_of_a_schemes_size_loses_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(demo.language_reference()[:4000])
    options = [
        *("--models-dir", str(demo.EMBEDDED.parent), "--models", "gpt2-5m", "--text", str(text)),
        *("--window", "64", "--max-windows", "8", "--plan-windows", "2", "--weights", "rounded", "--bits", "2.5"),
        *("--uniform", "codebook2_g32", "--device", "cpu", "--out", str(tmp_path), "--measure", "gradient"),
    ]
    assert plan_quality.main(options) == 0
    rows = list(csv.DictReader((tmp_path / "plan_quality.csv").open()))
    uniform, plan = sorted(rows, key=lambda row: row["scheme"])
    assert (uniform["scheme"], float(uniform["bits"]), plan["scheme"]) == ("codebook2_g32", 2.5, "plan")
    assert float(plan["bits"]) <= 2.5
    assert float(plan["change_percent"]) < float(uniform["change_percent"])
    assert "| 2.500 | plan | +" in capsys.readouterr().out
