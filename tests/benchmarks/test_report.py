"""The report: what it says of rows that a test wrote, what it says without, and what it runs to get them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.reporting.rows import Rows, mean, provenance, speeds

RESULTS = report.harness.ROOT / "benchmarks" / "results"
ENV = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11", "commit": "abc123"}
Writer = Callable[[str, list[dict[str, Any]]], None]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes rows as a benchmark does: all columns in all rows, empty where there is no value."""

    def rows(bench: str, found: list[dict[str, Any]]) -> None:
        columns = list(dict.fromkeys(c for row in found for c in row)) + list(ENV)
        with (tmp_path / f"{bench}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows({**row, **ENV} for row in found)

    return rows


def lines_of(text: str, start: str) -> list[list[str]]:
    """Cells of the lines that begin a table with this."""
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith(start)]


def test_the_report_is_that_of_the_rows() -> None:
    assert (RESULTS / "report.md").read_text(encoding="utf-8") == report.report(RESULTS), "run benchmarks/report.py"


def test_without_rows_every_part_says_so(tmp_path: Path) -> None:
    assert report.main(["--out", str(tmp_path / "new")]) == 0
    text = (tmp_path / "new" / "report.md").read_text(encoding="utf-8")
    for bench in (
        *("report_quality", "report_layers", "bench_ladder", "bench_codebook", "bench_linear", "bench_gemm"),
        *("bench_attention", "bench_compare"),
    ):
        assert f"Not measured: there are no rows in `{bench}.csv`." in text
    assert "![" not in text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.md"]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def timed(variant: str, m: int, k: int, us: float, **more: Any) -> dict[str, Any]:
    return {"variant": variant, "m": m, "n": 8, "k": k, "median_us": us, **more}


def test_speeds_are_over_the_baseline_at_the_same_shape(write: Writer, tmp_path: Path) -> None:
    write("bench", [timed("a", 1, 4, 8), timed("b", 1, 4, 2), timed("a", 1, 8, 9), timed("b", 1, 8, 9)])
    found = speeds(((row["variant"], row) for row in Rows(tmp_path).of("bench")), "a")
    assert found == {1: {"a": [1.0, 1.0], "b": [4.0, 1.0]}}
    assert mean(found[1], "b") == pytest.approx(2.0)
    assert mean(found[1], "c") is None
    assert mean({**found[1], "b": [4.0]}, "b") is None  # of fewer shapes than the others
    assert speeds([("b", row) for row in Rows(tmp_path).of("bench", variant="b")], "a") == {}


def test_rows_name_all_they_were_measured_with(write: Writer, tmp_path: Path) -> None:
    write("bench", [timed("a", 1, 4, 8)])
    rows = Rows(tmp_path).of("bench")
    assert provenance("bench", [*rows, *rows, {**rows[0], "gpu": "none", "commit": "def"}]) == (
        "Rows: `bench.csv` (NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, commit abc123; no GPU, torch 2.11, "
        "commit def)."
    )


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def quality(scheme: str, perplexity: float, change: float, cache: str = "auto", own: Any = "") -> dict[str, Any]:
    sizes = {"weight_bytes": 1_500_000, "weight_bits": 4.4375, "cache_bytes_token": 2176 if cache == "int8" else 4096}
    text = {"windows": 9, "window": 512, "text": "book.txt", "what": "what it is"}
    row = {"model": "small", "scheme": scheme, "kv_cache": cache, "perplexity": perplexity, "change_percent": change}
    return {**row, "cache_percent": own, **sizes, **text}


SCHEMES = [
    quality("float", 40.0, 0.0),
    quality("float", 40.02, 0.05, "int8", 0.05),
    quality("w8a8", 40.4, 1.0),
    quality("w8a8", 40.48, 1.2, "int8", 0.198),
    quality("codebook4_fit", 40.8, 2.0),
]
LAYERS = [
    timed(name, m, k, us * m)
    for m in (1, 16)
    for k in (4, 8)
    for name, us in (("float", 8), ("w8a8", 4), ("codebook4", 2))
]


def test_schemes_and_the_cache_by_itself(write: Writer, tmp_path: Path) -> None:
    write("report_quality", SCHEMES)
    write("report_layers", LAYERS)
    text = report.report(tmp_path)
    assert "**small**, 9 windows of 512 tokens of book.txt:" in text
    schemes = lines_of(text, "| w8a8")
    assert schemes[0] == ["w8a8", "what it is", "40.40", "+1.00 %", "1.50", "4.44"]
    assert schemes[1] == ["w8a8", "40.400 (+1.000 %)", "40.480 (+1.200 %)", "+0.1980 %", "4096 → 2176"]
    assert schemes[2] == ["w8a8", "4.00", "4.00", "2.00×"]
    assert [cells[-1] for cells in lines_of(text, "| codebook4 ")] == ["4.00×", "4.00×"]
    assert "1 token, whole layers" in text
    assert "16 tokens, whole layers" in text
    write("report_quality", SCHEMES[2:3])
    assert "small, int8 keys and values: not measured." in report.report(tmp_path)


def test_types_of_activations_with_outliers_and_without(write: Writer, tmp_path: Path) -> None:
    facts = {"model": "small", "windows": 9, "window": 512, "text": "book.txt"}
    measured = (("plain", "float16", 40.0, 0.0), ("plain", "w8a8", 40.4, 1.0), ("outliers", "w8a8", 44.0, 10.0))
    write(
        "quality",
        [{**facts, "condition": c, "scheme": s, "perplexity": p, "change_percent": d} for c, s, p, d in measured],
    )
    text = report.report(tmp_path)
    assert "| small | small, outliers |" in text
    assert lines_of(text, "| float16 |") == [["float16", "40.00", "–"]]
    assert lines_of(text, "| w8a8 |") == [["w8a8", "+1.000 %", "+10.000 %"]]


CODEBOOK = [
    timed("fp16", 1, 4, 8, part="layer"),
    timed("codebook4", 1, 4, 4, part="layer"),
    timed("codebook4:plain", 1, 4, 3, part="kernel"),
    timed("codebook4:pdl", 1, 4, 2, part="kernel"),
    timed("fp16", 512, 4, 6, part="prompt"),
    timed("codebook4", 512, 4, 12, part="prompt"),
]


def test_the_ladder_and_speeds_by_tokens(write: Writer, tmp_path: Path) -> None:
    def step(name: str, us: float, m: Any = 4096) -> dict[str, Any]:
        return {"step": name, "median_us": us, "tops": 1.5, "m": m, "n": m, "k": m}

    write("bench_ladder", [step("peak", 1.0, ""), step("naive", 800.0), step("better", 200.0), step("best", 40.0)])
    write("bench_codebook", CODEBOOK)
    write("bench_linear", [timed(v, m, 4, us) for m in (16, 1024) for v, us in (("fp16", 9), ("qcut_w8a8", 6))])
    write(
        "bench_gemm",
        [timed(v, 64, 4, us) for v, us in (("fp16", 9), ("qcut_s8", 6))]
        + [{**timed("fp16", 8, 8, 1), "variant": v} for v in ("fp16", "qcut_s8")],
    )
    text = report.report(tmp_path)
    assert "A prompt's size, 4096 × 4096 × 4096" in text
    assert lines_of(text, "| best") == [["best", "40.0", "1.50", "5.00", "20.0"]]
    assert lines_of(text, "| peak") == []
    # w8a16, codebook4 and codebook4_int8: plain, pdl, layer
    assert lines_of(text, "| 1 |") == [["1", "1", *"–––", "2.67×", "4.00×", "2.00×", *"–––"]]
    assert lines_of(text, "| 512 |") == [["512", "1", "0.50×", "–"]]
    assert lines_of(text, "| 1024 |") == [["1024", "1", "1.50×", "–", "–", "–"]]
    assert lines_of(text, "| 16 |") == []  # no prompt
    assert lines_of(text, "| 64 |") == [["64", "1", "–", "–", "–", "1.50×", "–"]]
    assert lines_of(text, "| 8 |") == []  # a square


ATTENTION = [
    {"variant": name, "batch": batch, "context": context, "median_us": us * context, "floor_pct": share}
    | {"heads": 32, "kv_heads": 8, "head": 128}
    for batch, context in ((8, 64), (1, 256), (1, 64))
    for name, us, share in (("qcut", 0.5, 76.4), ("naive", 2.0, 20.0))
]


def test_attention_by_batch_and_context(write: Writer, tmp_path: Path) -> None:
    write("bench_attention", [*ATTENTION, {**ATTENTION[0], "context": 512, "floor_pct": "nan"}])
    text = report.report(tmp_path)
    assert lines_of(text, "| 1 |") == [
        ["1", "64", "32.0", "128", "4.0×", "76 %"],
        ["1", "256", "128", "512", "4.0×", "76 %"],
    ]
    assert lines_of(text, "| 8 |")[1] == ["8", "512", "32.0", "–", "–", "–"]
    assert "32 heads of 128, 8 of keys" in text


def way(variant: str, tokens_s: Any, **more: Any) -> dict[str, Any]:
    sizes = {"case": "small", "width": 288, "layers": 6, "vocabulary": 32000, "prompt": 16, "new": 128}
    us = {"median_us": 1e6 / tokens_s} if tokens_s else {}
    rest = {"cpu": "a CPU, 16 cores", "transformers": "5.23.0", "tokens_s": tokens_s}
    return {**sizes, "variant": variant, "dtype": "float16", **us, **rest, **more}


ENGINES = [
    way("eager_dynamic", 100.0),
    way("cpp", 50.0, threads=1, dtype="float32"),
    way("cpp", 150.0, threads=16, dtype="float32"),
    way("qcut", 5000.0),
    way("eager_static", 80.0),
    way("compile", "", reason="RuntimeError: a | b"),
]


def test_engines_are_over_the_better_eager_loop(write: Writer, tmp_path: Path) -> None:
    write("bench_compare", ENGINES)
    text = report.report(tmp_path)
    assert "**small**: 6 layers of 288, vocabulary 32000; 128 tokens after 16." in text
    assert lines_of(text, "| qcut.Engine") == [["qcut.Engine", "float16", "5,000", "200", "50.00×", ""]]
    eager = [cells[4] for cells in lines_of(text, "| transformers eager")]
    assert eager == ["0.80×", "1.00×"]
    assert [cells[0] for cells in lines_of(text, "| C++")] == ["C++ on the CPU, 1 thread", "C++ on the CPU, 16 threads"]
    (compiled,) = lines_of(text, "| torch.compile")
    assert compiled[1:] == ["float16", "–", "–", "–", r"not measured: RuntimeError: a \| b"]
    assert "a CPU, 16 cores, transformers 5.23.0." in text
    write("bench_compare", [row for row in ENGINES if row["variant"] == "qcut"])
    assert lines_of(report.report(tmp_path), "| qcut.Engine")[0][4] == "–"


# ── plots ────────────────────────────────────────────────────────────────────────────────────────


def test_plots_are_drawn_and_the_same_again(write: Writer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    everything = {"report_quality": SCHEMES, "report_layers": LAYERS, "bench_codebook": CODEBOOK}
    for bench, rows in (everything | {"bench_attention": ATTENTION, "bench_compare": ENGINES}).items():
        write(bench, rows)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    names = ("report_memory", "report_speed", "report_matmul", "report_attention", "report_engine")
    drawn = {path: path.read_bytes() for name in names for path in tmp_path.glob(f"{name}.*")}
    assert len(drawn) == 10
    assert all(f"({name}.png)" in text for name in names)
    assert b"codebook4_fit" in drawn[tmp_path / "report_speed.svg"]
    report.quantization.plot(Rows(tmp_path), tmp_path)
    assert {path: path.read_bytes() for path in drawn} == drawn


# ── what it runs ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Scripts and arguments that would be run; the second fails."""
    found: list[list[str]] = []

    class Done:
        def __init__(self, returncode: int) -> None:
            self.returncode = returncode

    def run(command: list[str]) -> Done:
        found.append(command[1:])
        return Done(int(len(found) == 2))

    monkeypatch.setattr(report.subprocess, "run", run)
    return found


def test_parts_are_run_in_order_and_failures_told(commands: list[list[str]], tmp_path: Path) -> None:
    given = ["--models", "x", "y", "--text", "book.txt", "--files", "a.bin", "--cases", "tiny", "--quick"]
    assert report.main(["--run", "d,a", "--out", str(tmp_path), "--device", "cpu", *given]) == 1
    assert [Path(command[0]).name for command in commands] == ["bench_compare.py", "report_quality.py"]
    assert all(Path(command[0]).is_file() for command in commands)
    shared = ["--out", str(tmp_path), "--quick", "--device", "cpu"]
    assert commands[0][1:] == [*shared, "--cases", "tiny", "--files", "a.bin"]
    assert commands[1][1:9] == [*shared, "--models", "x", "y"]
    assert commands[1][-2:] == ["--text", "book.txt"]
    assert (tmp_path / "report.md").is_file()


def test_the_matmul_and_attention_have_their_benchmarks(commands: list[list[str]], tmp_path: Path) -> None:
    report.main(["--run", "b,c", "--out", str(tmp_path)])
    names = ["bench_ladder.py", "bench_gemm.py", "bench_linear.py", "bench_codebook.py", "bench_attention.py"]
    assert [Path(command[0]).name for command in commands] == names
    assert all(Path(command[0]).is_file() for command in commands)


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--run", "a,e"])
    assert "e is not one of a, b, c, d" in capsys.readouterr().err
