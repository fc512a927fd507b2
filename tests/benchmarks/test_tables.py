"""The measured figures of README.md and docs/performance.md are those of the rows in benchmarks/results."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_codebook, tables
from benchmarks.reporting.markdown import figures, us
from benchmarks.reporting.rows import Rows

Writer = Callable[[str, list[dict[str, Any]]], Rows]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.name)
def test_pages_print_the_measured_rows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text, Rows(tables.RESULTS)) == text, "run `python benchmarks/tables.py`"


def test_every_figure_has_a_place() -> None:
    places = [name for page in tables.PAGES for name in re.findall(r"<!-- measured: (.*?) -->", page.read_text())]
    assert sorted(places) == sorted(tables.MEASURED)


def test_the_plot_shows_the_measured_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables.plot(Rows(tables.RESULTS), tmp_path)
    # matplotlib writes each text it draws as a comment; shapes may differ by release.
    drawn, kept = (re.findall("<!-- (.+?) -->", (at / "headline.svg").read_text()) for at in (tmp_path, tables.RESULTS))
    assert len(drawn) > 20
    assert drawn == kept, "run `python benchmarks/tables.py`"


def test_times_print_three_figures() -> None:
    assert [us(v) for v in (3.04, 99.9, 99.96, 101.4, None)] == ["3.0", "99.9", "100", "101", "–"]
    values = (1.551, 9.994, 9.995, 16.605, 99.96, None)
    assert [figures(v) for v in values] == ["1.55", "9.99", "10.0", "16.6", "100", "–"]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes rows of a benchmark, and returns the folder's."""
    (tmp_path / "peers").mkdir()

    def written(bench: str, rows: list[dict[str, Any]]) -> Rows:
        with (tmp_path / f"{bench}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return Rows(tmp_path)

    return written


def row(part: str, shape: tuple[int, int, int], variant: str, median_us: float) -> dict[str, Any]:
    m, n, k = shape
    return {"part": part, "m": m, "n": n, "k": k, "variant": variant, "median_us": median_us, "gb_s": 2240.0}


def test_speedups_are_of_whole_layers_alone(write: Writer) -> None:
    few, prompt = (1, 1280, 1280), (4096, 4096, 4096)
    rows = write(
        "bench_codebook",
        [
            row("kernel", few, "codebook4:plain", 0.1),
            row("layer", few, "fp16", 8.0),
            row("layer", few, "codebook4", 2.0),
            row("layer", (4, 1280, 1280), "fp16", 8.0),
            row("layer", (4, 1280, 1280), "codebook4", 8.0),
            row("prompt", prompt, "fp16", 5.0),
            row("prompt", prompt, "codebook4", 10.0),
        ],
    )
    assert tables.codebook_speedups(rows) == (
        "Speed over float16, geometric mean: 1 to 64 tokens `codebook4` 2.00× (least 1.00× at 4 × 1280 × 1280); "
        "prompts `codebook4` 0.50× (least 0.50× at 4096 × 4096 × 4096)."
    )


def test_best_of_others_is_the_faster_of_both_sources(write: Writer) -> None:
    known, beside, nowhere = (4096, 5120, 1280), (16, 4096, 4096), (64, 1280, 1280)
    name, value = bench_codebook.PEERS_US[known]
    timed = [
        row("", known, "fp16", 1.0),
        row("", known, "qcut_w8a8", 1.0),
        row("", known, name, value - 1),
        row("", beside, "gemlite_w8a16", 15.2),
        row("", beside, "humming_w8a16", 10.2),
    ]
    rows = write("peers/bench_linear", timed)
    assert tables.best_peer(rows, known) == (name, value - 1)
    assert tables.best_peer_cell(rows, beside) == "10.2 humming_w8a16"
    assert tables.best_peer_cell(rows, nowhere) == "–"
    timed[2]["median_us"] = value + 1
    assert tables.best_peer(write("peers/bench_linear", timed), known) == (name, value)


def test_kernel_rates_are_those_with_dependent_launch(write: Writer) -> None:
    timed = []
    for shape in ((m, n, k) for m in tables.KERNEL_TOKENS for n, k in bench_codebook.NK):
        for scheme in ("codebook4", "codebook4_int8", "w8a16"):
            timed += [row("kernel", shape, f"{scheme}:{how}", us) for how, us in (("plain", 3), ("pdl", 2))]
        timed[-6]["gb_s"] = 1.0
    lines = tables.codebook_kernel(write("bench_codebook", timed)).splitlines()
    assert len(lines) == 2 + len(tables.KERNEL_TOKENS) * len(bench_codebook.NK)
    assert lines[2] == "| 1 × 14336 × 4096 | 3.00 / 2.00 | 2240 | 50 % | 3.00 / 2.00 | 3.00 / 2.00 |"


def test_a_place_without_a_figure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="nothing"):
        tables.filled("<!-- measured: nothing -->\n<!-- end -->", Rows(tmp_path))
