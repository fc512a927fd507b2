"""The demo, on the embedded checkpoint and a CPU."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from benchmarks import demo
from qcut.models.evaluation import perplexity, windows_of

pytest.importorskip("transformers", reason="the demo needs the hf extra")

TOPICS_SHA256 = "71f2ff5d99bdc1f9"
"""Start of the hash of the language reference whose perplexity is known; CPython releases differ a little."""


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


def test_variants_that_compute_the_same_are_timed_once(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    small = ["--quick", "--device", "cpu", "--window", "32", "--eval-windows", "2", "--json", str(out)]
    assert demo.main([*small, "--schemes", "w8a8_static,smooth,w8a8"]) == 0
    _, static, smooth, dynamic = json.loads(out.read_text())["results"]
    assert static["layers"] == smooth["layers"] != dynamic["layers"]
    assert static["perplexity"] != smooth["perplexity"]
    for figure in ("prompt_tokens_per_s", "generated_tokens_per_s", "model_mb", "peak_mb"):
        assert static[figure] == smooth[figure]
    assert static["prompt_tokens_per_s"] != dynamic["prompt_tokens_per_s"]


def test_demo_takes_any_codebook() -> None:
    assert demo.parse_args(["--schemes", "codebook4+4_int8, int4"]).schemes == ["codebook4+4_int8", "int4"]


def test_demo_baseline_is_the_known_perplexity() -> None:
    text = demo.language_reference()
    known = hashlib.sha256(text.encode()).hexdigest().startswith(TOPICS_SHA256)
    model, tokenizer = demo.load_model(str(demo.EMBEDDED), torch.float32)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    measured = perplexity(model, tokens, max_windows=20, progress=False)
    assert measured == (pytest.approx(30.176, abs=0.005) if known else pytest.approx(30, rel=0.2))


def test_calibration_and_evaluation_share_no_window(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a short text" for i in range(200)))
    args = demo.parse_args(["--text", str(text), "--window", "128", "--device", "cpu"])
    setup = demo.prepare(args)
    tokens = torch.tensor(setup.tokenizer(text.read_text())["input_ids"])
    everything = torch.cat([setup.evaluation, setup.calibration])
    assert len(setup.evaluation) >= 1
    assert len(setup.calibration) >= 1
    torch.testing.assert_close(everything, windows_of(tokens, 128)[: len(everything)], rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "w8a8,w4"], "unknown scheme w4: choose from w8a16, w8a8"),
        (["--window", "1"], "--window 1: at least 2 tokens"),
        (["--eval-windows", "0"], "--eval-windows 0: at least 1"),
    ],
)
def test_demo_refuses_bad_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(options)
    assert message in capsys.readouterr().err
