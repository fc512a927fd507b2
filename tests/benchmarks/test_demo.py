"""The demo, on the embedded checkpoint and a CPU."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from benchmarks import demo
from qcut.models.evaluation import language_reference, perplexity

pytest.importorskip("transformers", reason="the demo needs the hf extra")


TOPICS_SHA256 = "71f2ff5d99bdc1f9"


def test_demo_measures_quality_speed_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    small = ["--quick", "--device", "cpu", "--window", "64", "--eval-windows", "4", "--json", str(out)]
    assert demo.main([*small, "--schemes", "codebook4_fit,hybrid"]) == 0
    result = json.loads(out.read_text())
    rows = {row["scheme"]: row for row in result["results"]}
    assert list(rows) == ["fp32", "codebook4_fit", "hybrid"]
    baseline = rows.pop("fp32")
    assert baseline["layers"] == {}
    for name, row in rows.items():
        assert sum(row["layers"].values()) == 16, name
        assert row["model_mb"] < baseline["model_mb"]
        assert row["prompt_tokens_per_s"] > 0
        assert row["generated_tokens_per_s"] > 0
        assert row["peak_mb"] > row["model_mb"]
        assert row["change_percent"] == pytest.approx(100 * (row["perplexity"] / baseline["perplexity"] - 1))
        assert 0 < abs(row["change_percent"]) < (10 if name.startswith("codebook") else 2)
    assert rows["codebook4_fit"]["layers"] == {"codebook4": 16}
    assert rows["codebook4_fit"]["model_mb"] < rows["hybrid"]["model_mb"]
    assert len(result["plan"]["layers"]) == 16
    assert list(result["samples"]) == ["fp32", "hybrid"]
    assert all(text.startswith("The with statement") for text in result["samples"].values())
    printed, said = capsys.readouterr()
    assert [line[9:].split(",")[0].split(":")[0] for line in said.splitlines() if "of 2:" in line] == list(rows)
    assert "\r" not in said
    assert "CPU reference" in printed
    assert "resident set" in printed
    for name in ("fp32", *rows):
        assert any(line.startswith(name) for line in printed.splitlines())


def test_demo_baseline_is_the_known_perplexity() -> None:
    text = language_reference()
    known = hashlib.sha256(text.encode()).hexdigest().startswith(TOPICS_SHA256)
    model, tokenizer = demo.load_model(str(demo.EMBEDDED), torch.float32)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    measured = perplexity(model, tokens, max_windows=20, progress=False)
    assert measured == (pytest.approx(30.176, abs=0.005) if known else pytest.approx(30, rel=0.2))


def test_demo_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("too short")
    binary.write_bytes(b"\xff\xfe\x00")
    for options, message in (
        (["--model", "./no/such/folder"], "--model ./no/such/folder: not a directory"),
        (["--model", str(tmp_path)], f"--model {tmp_path}: "),
        (["--text", "no_such_file.txt"], "--text no_such_file.txt: "),
        (["--text", str(short)], "tokens; calibration and evaluation need 512 each"),
        (["--text", str(binary)], f"--text {binary}: 'utf-8' codec"),
        (["--window", "513"], "--window 513: this model has 512 positions"),
    ):
        assert demo.main(["--quick", "--device", "cpu", *options]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert message in error
