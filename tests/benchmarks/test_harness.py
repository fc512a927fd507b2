"""Rows, tables and options that all benchmarks share, and the listing of them."""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.__main__ import SUBJECTS, listing
from benchmarks.harness import CheckError, Timing, Variant
from benchmarks.layers import linear, shapes
from qcut.errors import ConfigError
from tests.support import ROOT

COMMANDS = [(subject, name) for subject, names in SUBJECTS.items() for name in names.split()]
FOUND = sorted(
    (path.parent.name, path.stem)
    for path in (ROOT / "benchmarks").glob("*/*.py")
    if "@harness.script(" in path.read_text() or "@script(" in path.read_text()
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def test_every_script_is_listed_and_documented() -> None:
    assert sorted(COMMANDS) == FOUND
    page, listed = (ROOT / "docs" / "measuring.md").read_text(), listing()
    for subject, name in COMMANDS:
        assert f"| `{subject} {name}` |" in page
        assert f"{subject} {name} " in listed


def test_scripts_run_from_any_folder() -> None:
    shown = run("publish", "scale", "--model", "8B", "--gpus", "1")
    assert (shown.returncode, "tokens/s" in shown.stdout) == (0, True), shown.stderr
    assert run("--help").returncode == 0
    nothing = run("layers", "nothing")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "layers gemm" in nothing.stderr


@pytest.mark.parametrize(("subject", "name"), COMMANDS)
def test_scripts_tell_their_options(subject: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = pytest.importorskip(f"benchmarks.{subject}.{name}")
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [*SUBJECTS["layers"].split()])
def test_without_a_gpu_status_is_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        pytest.importorskip(f"benchmarks.layers.{name}").main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layers", "gemm", "--outputs", "s8,f8"], "f8 is not one of s8, f16, bf16"),
        (["layers", "tutorial", "--steps", "wmma"], "wmma is not one of naive, "),
        (["layers", "tutorial", "--size", "4000"], "4000: a multiple of 128"),
        (["layers", "crossover", "--shapes", "4096"], "'4096' is not NxK"),
        (["engine", "compare", "--cases", "tiny,huge"], "huge is not one of llama2c-288, llama2c-512, tiny"),
        (["perplexity", "divergence", "--methods", "w8a8,w5"], "w5 is not one of w8a8, "),
        (["perplexity", "schemes", "--models-dir", "no", "--text", __file__], "no/gpt2-14m does not exist"),
        (["publish", "scale", "--gpus", "65"], "--gpus 65: 1 or more, and at most 64 GPUs"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    subject, name, *rest = words
    assert (harness.ROOT / "benchmarks" / subject / f"{name}.py").is_file()  # what is skipped needs other packages
    with pytest.raises(SystemExit) as stop:
        pytest.importorskip(f"benchmarks.{subject}.{name}").main(rest)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_are_printed_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    @harness.script(harness.device_option)
    def main(options: argparse.Namespace) -> int:
        """Refuse."""
        raise ConfigError(f"no {options.device}")

    assert main(["--device", "cpu"]) == 1
    assert capsys.readouterr().err == "error: no cpu\n"


def test_geomean() -> None:
    assert harness.geomean([0.5, 2.0, 1.0, 8.0]) == pytest.approx(8.0**0.25)
    assert math.isnan(harness.geomean([]))


def test_wrong_results_are_reported_and_not_timed() -> None:
    def fail() -> None:
        raise CheckError("3 of 4 elements differ")

    said: list[str] = []
    right, unchecked = Variant("right", lambda i: None, check=lambda: None), Variant("unchecked", lambda i: None)
    good, wrong = harness.checked([right, Variant("bad", lambda i: None, check=fail), unchecked], said.append)
    assert (good, wrong) == ([right, unchecked], ["bad"])
    assert said == ["WRONG bad: 3 of 4 elements differ"]


@pytest.mark.parametrize(("gpu", "floor_pct"), [("NVIDIA H200", 51.0), ("another", math.nan)])
def test_a_gemms_row_has_its_rates(gpu: str, floor_pct: float) -> None:
    results = harness.Results("some", harness.Environment(gpu, "", "", "", ""))
    timing = harness.Timing(2.0, 1.9, 2.1, 5)
    shape = shapes.Shape(1000, 1000, 1010)
    row = results.add_gemm(timing, shape, "mine", 3.03e6, 8, kernel="k")
    assert list(row)[:8] == ["bench", "m", "n", "k", "variant", "tops", "gb_s", "floor_pct"]
    assert (row["tops"], row["gb_s"], row["kernel"]) == (1010.0, 1515.0, "k")
    assert row["floor_pct"] == pytest.approx(floor_pct, nan_ok=True)


def test_csv_rows_carry_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_COMMIT", "abc123")
    results = harness.Results("bench", harness.environment())
    results.add(Timing(1.0, 0.5, 2.0, 7), m=1, kernel="k")
    results.add(Timing(3.0, 3.0, 3.0, 1, "eager"), m=2, note="late column")
    path = results.write_csv(tmp_path / "new")
    rows = list(csv.DictReader(path.open(newline="")))
    assert [r["median_us"] for r in rows] == ["1.0", "3.0"]
    assert rows[0]["kernel"] == "k"
    assert rows[0]["note"] == ""
    assert {r["commit"] for r in rows} == {"abc123"}
    assert {r["torch"] for r in rows} == {torch.__version__}
    assert {"gpu", "driver", "cuda", "mode", "p20_us", "p80_us", "samples"} <= rows[0].keys()
    assert [p.name for p in path.parent.iterdir()] == ["bench.csv"]


def test_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    ceiling = harness.CEILINGS["NVIDIA H200"]
    decode, prompt = shapes.Shape(1, 14336, 4096), shapes.Shape(4096, 14336, 4096)
    assert ceiling.floor_us(decode.ops, decode.bytes_moved(16, 8, 16)) == pytest.approx(13.1, abs=0.05)
    assert ceiling.floor_us(prompt.ops, prompt.bytes_moved(8, 8, 8)) == pytest.approx(prompt.ops / 1979e6)


def test_table_aligns_and_shows_missing_numbers() -> None:
    text = harness.table(["name", "µs"], [["a", 1234.56], ["long", math.nan], ["c", 0.98765]])
    assert text.splitlines() == ["name      µs", "   a  1234.6", "long       -", "   c   0.988"]


def test_rows_of_some_schemes_leave_those_of_others(tmp_path: Path) -> None:
    def results(commit: str, *variants: str) -> harness.Results:
        found = harness.Results("bench_linear", harness.Environment("GPU", "1", "13.0", "2.11", commit))
        for name in variants:
            found.add(Timing(1.0, 1.0, 1.0, 3, "graph"), m=1, n=2, k=3, variant=name, kernel="")
        return found

    linear.write(results("old", "fp16", "qcut_w8a8", "qcut_int16x8"), tmp_path, whole=True)
    path = linear.write(results("new", "fp16", "qcut_int16x8"), tmp_path, whole=False)
    rows = {row["variant"]: row["commit"] for row in harness.read_rows(path)}
    assert rows == {"fp16": "old", "qcut_w8a8": "old", "qcut_int16x8": "new"}
    linear.write(results("new", "fp16", "qcut_w8a8"), tmp_path, whole=True)
    assert {row["commit"] for row in harness.read_rows(path)} == {"new"}
