"""The quality benchmark, on the embedded checkpoint and a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import demo, quality

pytest.importorskip("transformers", reason="the benchmark needs the hf extra")


def test_outliers_hurt_int8_and_smoothing_takes_them_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(demo.language_reference()[:8000])
    options = [
        *("--models-dir", str(demo.EMBEDDED.parent), "--models", "gpt2-5m", "--text", str(text)),
        *("--window", "64", "--max-windows", "4", "--calibration-windows", "8", "--plan-windows", "2"),
        *("--device", "cpu", "--out", str(tmp_path), "--schemes", "w8a8,w8a8_static,smooth,smooth_hybrid"),
    ]
    assert quality.main(options) == 0
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    assert (tmp_path / "quality.csv").read_text().count("\n") == len(rows) + 1
    plain = {row["scheme"]: row for row in rows if row["condition"] == "plain"}
    outliers = {row["scheme"]: row for row in rows if row["condition"] == "outliers"}
    assert list(plain) == list(outliers) == ["float32", "w8a8", "w8a8_static", "smooth", "smooth_hybrid"]
    assert outliers["float32"]["perplexity"] == pytest.approx(plain["float32"]["perplexity"], rel=1e-4)
    assert outliers["w8a8_static"]["change_percent"] > 5 * abs(plain["w8a8_static"]["change_percent"])
    assert outliers["smooth"]["change_percent"] < outliers["w8a8_static"]["change_percent"] / 2
    assert "smooth_hybrid" in capsys.readouterr().out


def test_a_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality.main(["--models-dir", str(tmp_path), "--models", "absent", "--text", __file__])
    assert f"{tmp_path / 'absent'} does not exist" in capsys.readouterr().err
