"""The demo and the quality benchmark, on the embedded checkpoint and a CPU."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import quality
from examples import gpt2_int8, llama
from qcut.models.evaluation import perplexity, windows_of
from tests.support import ROOT

pytest.importorskip("transformers", reason="the demo needs the hf extra")

TOPICS_SHA256 = "71f2ff5d99bdc1f9"
"""Start of the hash of the language reference whose perplexity is known; CPython releases differ a little."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded checkpoint must never need a network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the demo opened a connection: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def run_demo(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    small = ["--quick", "--device", "cpu", "--window", "64", "--eval-windows", "4", "--json", str(out)]
    assert gpt2_int8.main([*small, *options]) == 0
    return json.loads(out.read_text())


def test_demo_measures_every_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_demo(tmp_path)
    rows = {row["scheme"]: row for row in result["results"]}
    assert list(rows) == ["fp32", *gpt2_int8.SCHEMES]
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
    assert rows["codebook4_fit"]["layers"] == rows["codebook4"]["layers"] == {"codebook4": 16}
    assert rows["codebook4"]["model_mb"] < rows["w8a16"]["model_mb"]
    assert rows["w8a8"]["layers"] == {"w8a8": 16}
    assert rows["smooth"]["layers"] == {"w8a8_static": 16}
    assert len(result["plan"]["layers"]) == 16
    assert list(result["samples"]) == ["fp32", "hybrid"]
    assert all(text.startswith("The with statement") for text in result["samples"].values())
    printed = capsys.readouterr().out
    assert "CPU reference" in printed
    assert "resident set" in printed
    for name in ("fp32", *rows):
        assert any(line.startswith(name) for line in printed.splitlines())


@pytest.mark.parametrize("scheme", ["codebook4+4_int8", "int4"])
def test_demo_takes_any_codebook(scheme: str, tmp_path: Path) -> None:
    rows = run_demo(tmp_path, "--scheme", scheme)["results"]
    assert [(row["scheme"], row["layers"]) for row in rows] == [("fp32", {}), (scheme, {scheme: 16})]
    assert abs(rows[1]["change_percent"]) < (1 if "+" in scheme else 10)


def test_demo_baseline_is_the_known_perplexity() -> None:
    text = gpt2_int8.language_reference()
    known = hashlib.sha256(text.encode()).hexdigest().startswith(TOPICS_SHA256)
    model, tokenizer = gpt2_int8.load_model(str(gpt2_int8.EMBEDDED), torch.float32)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    found = perplexity(model, tokens, max_windows=60, progress=False)
    assert found == (pytest.approx(29.99, abs=0.005) if known else pytest.approx(30, rel=0.2))


def test_calibration_and_evaluation_share_no_window(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a short text" for i in range(200)))
    args = gpt2_int8.parse_args(["--text", str(text), "--window", "128", "--device", "cpu"])
    setup = gpt2_int8.prepare(args)
    tokens = torch.tensor(setup.tokenizer(text.read_text())["input_ids"])
    everything = torch.cat([setup.evaluation, setup.calibration])
    assert len(setup.evaluation) >= 1
    assert len(setup.calibration) >= 1
    torch.testing.assert_close(everything, windows_of(tokens, 128)[: len(everything)], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./no/such/folder"], "--model ./no/such/folder: not a directory"),
        (["--text", "no_such_file.txt"], "--text no_such_file.txt: "),
        (["--window", "513"], "--window 513: this model has 512 positions"),
    ],
)
def test_demo_says_what_is_wrong(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpt2_int8.main(["--quick", "--device", "cpu", *options]) == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_demo_refuses_a_text_that_is_too_short_or_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    assert gpt2_int8.main(["--device", "cpu", "--text", str(text)]) == 1
    assert "tokens; calibration and evaluation need 512 each" in capsys.readouterr().err
    text.write_bytes(b"\xff\xfe\x00")
    assert gpt2_int8.main(["--device", "cpu", "--text", str(text)]) == 1
    assert f"error: --text {text}: 'utf-8' codec" in capsys.readouterr().err


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
        gpt2_int8.main(options)
    assert message in capsys.readouterr().err


def test_an_empty_checkpoint_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpt2_int8.main(["--device", "cpu", "--model", str(tmp_path)]) == 1
    assert f"error: --model {tmp_path}: " in capsys.readouterr().err


def test_quality_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(gpt2_int8.language_reference()[:8000])
    options = [
        *("--models-dir", str(gpt2_int8.EMBEDDED.parent), "--models", "gpt2-5m", "--text", str(text)),
        *("--window", "64", "--max-windows", "4", "--calibration-windows", "8", "--plan-windows", "2"),
        *("--device", "cpu", "--out", str(tmp_path), "--schemes", "w8a8,w8a8_static,smooth,smooth_hybrid"),
    ]
    assert quality.main(options) == 0
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    assert (tmp_path / "quality.csv").read_text().count("\n") == len(rows) + 1
    plain = {row["scheme"]: row for row in rows if row["condition"] == "plain"}
    outliers = {row["scheme"]: row for row in rows if row["condition"] == "outliers"}
    assert list(plain) == list(outliers) == ["float32", "w8a8", "w8a8_static", "smooth", "smooth_hybrid"]
    # The injection changes nothing in float, and it does hurt int8; smoothing takes it back.
    assert outliers["float32"]["perplexity"] == pytest.approx(plain["float32"]["perplexity"], rel=1e-4)
    assert outliers["w8a8_static"]["change_percent"] > 5 * abs(plain["w8a8_static"]["change_percent"])
    assert outliers["smooth"]["change_percent"] < outliers["w8a8_static"]["change_percent"] / 2
    assert "smooth_hybrid" in capsys.readouterr().out


def test_quality_benchmark_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality.main(["--models-dir", str(tmp_path), "--models", "absent", "--text", __file__])
    assert f"{tmp_path / 'absent'} does not exist" in capsys.readouterr().err


def test_readme_walk_through_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("\n## Walk-through\n")[1].split("\n## ")[0]
    snippets = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(snippets) >= 7
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet.replace('"/tmp/', f'"{tmp_path}/'), "README.md", "exec"), names)
    assert names["again"] is not names["model"]


# ── a model of Llama's shape ─────────────────────────────────────────────────────────────────────


def test_llama_runs_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert llama.main(["--new-tokens", "3", "--device", "cpu", "--scheme", "w8a8"]) == 0
    printed = capsys.readouterr().out
    before, after = re.search(r"([\d.,]+) MB, as w8a8 ([\d.,]+) MB", printed).groups()  # type: ignore[union-attr]
    assert float(after) < 0.4 * float(before)
    texts = [line.split() for line in printed.splitlines() if line and all(w.isdigit() for w in line.split())]
    assert [len(text) for text in texts] == [len(prompt) + 3 for prompt in llama.PROMPTS]
    assert "4 more in" in printed


def test_llama_continues_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(ROOT / "models" / "gpt2-5m"), "--new-tokens", "4", "--device", "cpu"]
    assert llama.main([*arguments, "--prompt", "The with statement", "--kv-cache", "int8"]) == 0
    assert "\nThe with statement" in capsys.readouterr().out


def test_llama_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llama.main(["--model", str(tmp_path)]) == 1
    assert f"error: {tmp_path}" in capsys.readouterr().err
    assert llama.main(["--scheme", "fp3", "--device", "cpu"]) == 1
    assert "fp3" in capsys.readouterr().err
