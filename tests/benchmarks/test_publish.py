"""Pages, the report and plots say what the rows in benchmarks/results say; tables of made-up rows."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RESULTS
from benchmarks.publish import headline, plots, quantization, tables
from benchmarks.publish.rows import Rows, mean, provenance, speeds
from benchmarks.scaling import pages

ENV = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11", "commit": "abc123"}
Writer = Callable[[str, list[dict[str, Any]]], Rows]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes rows as a benchmark does, and returns the folder's."""

    def rows(bench: str, found: list[dict[str, Any]]) -> Rows:
        path = tmp_path / f"{bench}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(c for row in found for c in row)) + list(ENV), restval="")
            writer.writeheader()
            writer.writerows({**row, **ENV} for row in found)
        return Rows(tmp_path)

    return rows


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.name)
def test_pages_print_the_measured_rows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text, Rows(tables.RESULTS)) == text, "run `python benchmarks publish tables`"


def test_every_figure_has_a_place() -> None:
    places = [name for page in tables.PAGES for name in re.findall(r"<!-- measured: (.*?) -->", page.read_text())]
    assert sorted(places) == sorted(tables.MEASURED)


def test_rows_keep_their_benchmarks_names() -> None:
    files = [path for path in RESULTS.rglob("*.csv") if path.stem != "report_layers"]
    assert len(files) > 40
    for path in files:
        rows = Rows(path.parent).of(path.stem)
        assert {row["bench"] for row in rows} == {path.stem}, path
        assert all(row["gpu"] and row["torch"] and row["commit"] for row in rows), path


PLOTS = [("headline", headline.plot), ("scale", pages.plot), ("divergence", quantization.plot)]


@pytest.mark.parametrize(("name", "draw"), PLOTS)
def test_plots_show_the_measured_rows(name: str, draw: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Rows(RESULTS), tmp_path)
    # matplotlib writes each text it draws as a comment; shapes may differ by release.
    drawn, kept = (re.findall("<!-- (.+?) -->", (at / f"{name}.svg").read_text()) for at in (tmp_path, RESULTS))
    assert len(drawn) > 15
    assert drawn == kept, "run `python benchmarks publish tables`"


def test_plots_of_every_kind_are_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def draw() -> dict[str, bytes]:
        plots.ratios(tmp_path / "ratios", ["a", "b"], {"x": [1.0, 2.0], "y": [float("nan"), 0.5]}, "title", "speed")
        plots.stacks(tmp_path / "stacks", {"a": {"norms": 1.0}}, {"floor": {"a": float("nan")}}, "title", "µs")
        quantization.plot(Rows(RESULTS), tmp_path)
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    first = draw()
    assert len(first) == 4
    assert all(name.endswith(".svg") and b"<svg" in data for name, data in first.items())
    assert draw() == first


def test_tables_without_rows_say_so(tmp_path: Path) -> None:
    for table in (
        *quantization.TABLES.values(),
        tables.crossover_cells,
        tables.triton_layers,
        tables.caches,
        tables.cache_quality,
        tables.zero_points,
    ):
        assert table(Rows(tmp_path)).startswith("Not measured")


def timed(variant: str, m: int, k: int, us: float, **more: Any) -> dict[str, Any]:
    return {"variant": variant, "m": m, "n": 8, "k": k, "median_us": us, **more}


def test_speeds_are_over_the_baseline(write: Writer, tmp_path: Path) -> None:
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


def test_a_place_without_a_figure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="nothing"):
        tables.filled("<!-- measured: nothing -->\n<!-- end -->", Rows(tmp_path))


def test_better_formats_of_others_are_named(write: Writer, tmp_path: Path) -> None:
    def row(method: str, by: str, bits: float, far: float, model: str = "a") -> dict[str, Any]:
        found = {"model": model, "method": method, "by": by, "bits": bits, "divergence": far, "divergence_999": 9 * far}
        text = {"windows": 4, "window": 64, "text": "t.txt"}
        return {**found, "same_top_percent": 90, "change_percent": 1, "perplexity": 9, **text}

    ours = [row("codebook4", "qcut", 4.13, 0.02), row("codebook4_fitted", "qcut", 4.13, 0.01)]
    ours += [row("codebook4", "qcut", 4.13, 0.02, "b"), row("w8a16", "qcut", 8.0, 0.001)]
    others = [row("NF4", "others", 4.5, 0.015), row("NF4", "others", 4.5, 0.03, "b"), row("Q4_0", "others", 4.12, 0.5)]
    write("divergence", [row("float32", "", 32, 0.0), *ours, *others, row("MXFP4", "others", 4.0, 0.0001)])
    text = quantization.divergences(Rows(tmp_path))
    assert "rounded, too: NF4 (a). If they are fitted: none." in text  # MXFP4 has fewer bits than any of qcut's
    assert "| `codebook4` | 4.130 | 0.02, 90.0 % | 0.02, 90.0 % |" in text
    assert "| Q4_0 | 4.120 | 4.5, +1.00 % | – |" in text
    assert "float32 |" not in text
