"""``qcut bench``: its rows are what the other commands measure, and the recommendation follows from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from qcut.checkpoints.pretrained import load_pretrained
from qcut.cli.bench.measuring import ON_CPU, ON_GPU, Request
from qcut.cli.bench.report import TIE, WIDTH, Row, compared, recommend, table
from qcut.conversion.quantize import model_bytes
from qcut.errors import ConfigError
from qcut.models.evaluation import language_reference
from tests.cli.commands import answer
from tests.cli.commands import on_cpu as run
from tests.support.zoo import first_block

FEW = ("--window", 64, "--max-windows", 2, "--prompt-tokens", 8, "--new", 3, "--batches", "1,2")
GROWS = "codebook4+4_g1_none_fp32norms"
"""A scheme that makes every layer larger, so that none is quantized."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's first block."""
    path = tmp_path_factory.mktemp("models") / "block"
    first_block(path)
    return path


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_rows_are_what_other_commands_measure(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(language_reference()[:4000])
    words = ("--text", text, *FEW, "--device", "cpu")
    got = answer(capfd, "bench", folder, "--schemes", "W8A8,codebook4,w8a8", *words)
    assert [row["scheme"] for row in got["rows"]] == ["float32", "w8a8", "codebook4"]
    assert (got["window"], got["windows"], got["prompt_tokens"], got["new_tokens"]) == (64, 2, 8, 3)
    assert (got["device"], got["gpu"], got["reference"], got["text"]) == ("cpu", None, "float32", str(text))
    first = got["rows"][0]
    for row in got["rows"]:
        scheme = () if row is first else ("--scheme", row["scheme"])
        few = ("--window", 64, "--max-windows", 2, "--batch", 2, "--device", "cpu")
        known = answer(capfd, "eval", folder, "--text", text, *few, *scheme)
        assert row["perplexity"] == pytest.approx(known["perplexity"], rel=1e-6)
        assert row["change"] == pytest.approx(row["perplexity"] / first["perplexity"] - 1)
        model, _ = load_pretrained(str(folder), dtype=torch.float32, device=torch.device("cpu"))
        if row is not first:
            qcut.quantize(model, row["scheme"], progress=False)
        assert row["weight_bytes"] == model_bytes(model)
        assert (row["error"], row["runs_on"], row["peak_bytes"]) == ("", "qcut", None)
        assert set(row["tokens_per_s"]) == {"1", "2"}
        assert min(row["first_token_ms"], row["load_s"], row["warm_up_s"]) > 0
    assert got["recommendation"]["by"] == "memory"
    assert got["recommendation"]["scheme"] in {row["scheme"] for row in got["rows"]}


def test_text_fits_a_terminal_and_names_failures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    status, out, err = run(capfd, "bench", folder.name, "--schemes", f"{GROWS},w8a8", "--budget", 0.5, *FEW)
    assert status == 0, err
    lines = out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == f"{folder.name} in float32 on the CPU, run by qcut's engine"
    assert lines[2].split() == [
        *("scheme", "1st", "ms", "tok/s", "x1", "tok/s", "x2", "model", "MB", "perplexity", "change", "load", "s")
    ]
    assert lines[3].startswith("float32 ")
    assert lines[4].startswith(f"{GROWS}  not measured: GPT2LMHeadModel: no layer to quantize:")
    assert next(line for line in lines if line.startswith("w8a8 ")).split()[-2] == "%"
    assert "do not speak for a GPU" in out.replace("\n  ", " ")
    assert "the Python language reference" in out.replace("\n  ", " ")
    assert lines[-1].startswith("recommended: w8a8: least memory, ")


def test_a_quantized_model_is_the_only_row(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quantized"
    assert run(capfd, "quantize", folder, "--scheme", "w8a16", "--out", out)[0] == 0
    got = answer(capfd, "bench", out, *FEW, "--device", "cpu")
    assert [row["scheme"] for row in got["rows"]] == ["w8a16"]
    assert got["recommendation"] is None
    status, printed, err = run(capfd, "bench", out, "--schemes", "w8a8", *FEW)
    assert (status, printed) == (1, "")
    assert f"--schemes: {out} is quantized already (w8a16); allowed: a float model" in err


@pytest.mark.parametrize(
    ("context", "prompt", "new", "want"),
    [
        (None, None, None, (512, 128)),
        (4096, None, None, (512, 128)),
        (256, None, None, (192, 64)),
        (512, 500, None, (500, 12)),
        (512, None, 500, (12, 500)),
    ],
)
def test_sizes_fit_the_context(context: int | None, prompt: int | None, new: int | None, want: tuple[int, int]) -> None:
    request = Request("m", torch.device("cuda"), torch.float16, (1,), "", "", prompt, new)
    amounts = request.amounts(context)
    assert ((amounts.prompt, amounts.new), amounts.windows) == (want, ON_GPU.windows)
    on_cpu = Request("m", torch.device("cpu"), torch.float32, (1,), "", "", windows=7).amounts(context)
    assert (on_cpu.prompt, on_cpu.new, on_cpu.windows) == (ON_CPU.prompt, ON_CPU.new, 7)


def test_sizes_beyond_the_context_are_refused() -> None:
    request = Request("m", torch.device("cpu"), torch.float32, (1,), "", "", 500, 100)
    with pytest.raises(ConfigError, match="500 and --new 100 are 600 tokens; allowed: up to 512"):
        request.amounts(512)


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────


def row(scheme: str, first_ms: float, one: float, eight: float, mb: float, perplexity: float) -> Row:
    return Row(scheme, "", "qcut", first_ms, {1: one, 8: eight}, int(mb * 1e6), int(mb * 2e6), perplexity)


FLOAT = row("float16", 14.0, 100.0, 700.0, 16000, 10.0)
W8A16 = row("w8a16", 15.0, 180.0, 1200.0, 8000, 10.01)
W8A8 = row("w8a8", 9.0, 170.0, 1500.0, 8000, 10.05)
FOUR = row("codebook4", 14.5, 300.0, 1400.0, 4500, 10.08)
FOUR_INT8 = row("codebook4_int8", 11.0, 303.0, 1450.0, 4600, 10.3)
ROWS = (FLOAT, W8A16, W8A8, FOUR, FOUR_INT8)


def chosen(rows: Any, budget: float = 0.01, *, by_speed: bool = True) -> Any:
    return recommend(*compared(rows), budget, by_speed=by_speed)


def test_fastest_within_the_budget_is_recommended() -> None:
    found = chosen(ROWS)
    assert (found.scheme, found.by, found.prompts) == ("codebook4", "speed", "w8a8")
    assert found.batches == {1: "codebook4", 8: "w8a8"}
    assert found.text.splitlines() == [
        "codebook4: fastest at batch 1, 300.0 tokens/s, with 0.80 % more perplexity",
        "w8a8 for prompts: first token after 9.00 ms, codebook4 14.5 ms",
        "w8a8 at batch 8: 1,500 tokens/s, codebook4 1,400 tokens/s",
        "beyond the budget of 1 %: codebook4_int8 (+3.00 %); `qcut plan` mixes schemes within a budget",
    ]


@pytest.mark.parametrize(
    ("budget", "scheme"),
    [(0.0, "float16"), (0.001, "w8a16"), (0.005, "w8a16"), (0.008, "codebook4"), (0.05, "codebook4")],
)
def test_a_budget_bounds_the_loss(budget: float, scheme: str) -> None:
    """Of 300 and 303 tokens/s, which are equal to the rule, the one of less memory."""
    assert chosen(ROWS, budget + 1e-9).scheme == scheme


@pytest.mark.parametrize(("speed", "scheme"), [(300 * (1 + TIE / 2), "codebook4"), (300 * (1 + 2 * TIE), "large")])
def test_memory_decides_between_equal_speeds(speed: float, scheme: str) -> None:
    assert chosen((FLOAT, FOUR, row("large", 20.0, speed, 1.0, 9000, 10.0))).scheme == scheme


def test_memory_decides_where_speeds_do_not_count() -> None:
    """And of equal sizes the loss."""
    found = chosen(ROWS, 0.05, by_speed=False)
    assert (found.scheme, found.by, found.prompts, found.batches) == ("codebook4", "memory", None, {})
    assert found.text == "codebook4: least memory, 4,500 MB of weights, with 0.80 % more perplexity"
    assert chosen((FLOAT, W8A8, W8A16), by_speed=False).scheme == "w8a16"
    assert chosen(ROWS, 0.0, by_speed=False).scheme == "float16"


def test_failed_and_broken_rows_are_not_recommended() -> None:
    broken = row("broken", 1.0, 9e9, 9e9, 1, math.nan)
    endless = row("endless", 1.0, 9e9, 9e9, 1, math.inf)
    found = chosen((FLOAT, Row("failed", "no memory"), broken, endless))
    assert found.scheme == "float16"
    assert "beyond the budget of 1 %: broken (-), endless (-); " in found.text
    assert "failed" not in found.text
    assert chosen((broken, endless)) is None


def test_float_without_memory_leaves_the_best_row() -> None:
    """The others are then compared with the row of the least perplexity."""
    rows, reference = compared((Row("float16", "no memory"), *ROWS[1:]))
    assert reference == "w8a16"
    assert rows[2].change == pytest.approx(10.05 / 10.01 - 1)
    assert recommend(rows, reference, 0.01, by_speed=True).scheme == "codebook4"  # type: ignore[union-attr]


def test_a_speed_that_is_unknown_is_the_lowest() -> None:
    assert chosen((FLOAT, row("unknown", math.nan, math.nan, 1.0, 1, 10.0))).scheme == "float16"


def test_table_of_a_gpu_fits_a_terminal() -> None:
    rows, reference = compared((*ROWS, Row("fp8_dynamic", "not on this GPU: " + "a reason " * 60)))
    lines = table(rows, reference).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].split()[-4:] == ["load", "s", "build", "s"]
    assert "peak MB" in lines[0]
    assert [line.split()[0] for line in lines[1:7]] == [*(each.scheme for each in ROWS), "fp8_dynamic"]
    assert lines[4].split()[1:8] == ["14.5", "300.0", "1,400", "4,500", "9,000", "10.080", "+0.80"]
    assert len(lines) < 11
