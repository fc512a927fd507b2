"""The benchmark of plans within bits, on the embedded checkpoint and a CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import demo, plan_quality

transformers = pytest.importorskip("transformers", reason="the benchmark needs the hf extra")


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


def test_processes_fit_what_the_survey_would(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.EMBEDDED, local_files_only=True)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64, "n_inner": 64, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text(demo.language_reference()[:2000])
    found: list[list[dict[str, str]]] = []
    for count in ("0", "1"):
        out = tmp_path / count
        options = [
            *("--models-dir", str(tmp_path), "--models", "tiny", "--text", str(text), "--device", "cpu"),
            *("--window", "32", "--max-windows", "8", "--plan-windows", "2", "--calibration-windows", "4"),
            *("--weights", "fitted", "--bits", "3.0", "--uniform", "codebook2", "codebook2_g32", "w8a16"),
            *("--fit-processes", count, "--out", str(out)),
        ]
        assert plan_quality.main(options) == 0
        found.append(list(csv.DictReader((out / "plan_quality.csv").open())))
    for here, there in zip(*found, strict=True):
        assert [here[column] for column in ("scheme", "bits", "counts")] == [
            there[column] for column in ("scheme", "bits", "counts")
        ]
        # Processes have one thread: sums may have another order.
        assert float(here["change_percent"]) == pytest.approx(float(there["change_percent"]), abs=0.02)
        assert float(here["change_percent"])
    assert [row["scheme"] for row in found[0]] == ["codebook2", "w8a16", "plan", "codebook2_g32"]
