"""The README's measured tables and sentences are those of the rows in benchmarks/results."""

from __future__ import annotations

import csv

import pytest

from benchmarks import bench_codebook, readme_tables
from tests.support import ROOT

PASTE = "run `python -m benchmarks.readme_tables` and paste what changed"


@pytest.mark.parametrize("table", readme_tables.TABLES, ids=lambda t: t.__name__)
def test_readme_prints_the_measured_rows(table):
    text = table()
    assert len(text.splitlines()) > 5
    assert text in (ROOT / "README.md").read_text(), PASTE


@pytest.mark.parametrize("sentence", readme_tables.SENTENCES, ids=lambda t: t.__name__)
def test_readme_says_what_the_rows_say(sentence):
    assert sentence() in (ROOT / "README.md").read_text(), PASTE


def test_times_print_three_figures():
    assert [readme_tables.us(v) for v in (3.04, 99.9, 99.96, 101.4, None)] == ["3.0", "99.9", "100", "101", "–"]
    values = (1.551, 9.994, 9.995, 16.605, 99.96, None)
    assert [readme_tables.figures(v) for v in values] == ["1.55", "9.99", "10.0", "16.6", "100", "–"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results whose codebook rows a test writes."""
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    (tmp_path / "peers").mkdir()

    def write(name, rows):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    return write


def row(part, shape, variant, median_us, target_us="nan"):
    m, n, k = shape
    sizes = {"m": m, "n": n, "k": k}
    return {"part": part, **sizes, "variant": variant, "median_us": median_us, "gb_s": 2240.0, "target_us": target_us}


def test_missed_figures_are_named_and_reached_ones_counted(results):
    rows = [
        row("kernel", (1, 14336, 4096), "codebook4:plain", 10.3, 10.3),
        row("kernel", (1, 14336, 4096), "codebook4:pdl", 9.201, 9.2),
        row("prompt", (256, 14336, 4096), "codebook4_int8", 42.69, 40.0),
        row("prompt", (256, 14336, 4096), "fp16", 47.2),
    ]
    results("bench_codebook.csv", rows)
    assert readme_tables.codebook_misses() == (
        "Of 3 figures to reach 2 are missed, µs (to reach): codebook4 kernel pdl at 1 × 14336 × 4096 9.20 (9.2); "
        "codebook4_int8 layer at 256 × 14336 × 4096 42.7 (40)."
    )
    results("bench_codebook.csv", rows[:1])
    assert readme_tables.codebook_misses() == "All 1 figures to reach are reached."


def test_speedups_are_of_whole_layers_alone(results):
    few, prompt = (1, 1280, 1280), (4096, 4096, 4096)
    rows = [
        row("kernel", few, "codebook4:plain", 0.1),
        row("layer", few, "fp16", 8.0),
        row("layer", few, "codebook4", 2.0),
        row("layer", (4, 1280, 1280), "fp16", 8.0),
        row("layer", (4, 1280, 1280), "codebook4", 8.0),
        row("prompt", prompt, "fp16", 5.0),
        row("prompt", prompt, "codebook4", 10.0),
    ]
    results("bench_codebook.csv", rows)
    assert readme_tables.codebook_speedups() == (
        "Over fp16, geometric mean: 1 to 64 tokens `codebook4` 2.00× (worst 1.00× at 4 × 1280 × 1280); "
        "prompts `codebook4` 0.50× (worst 0.50× at 4096 × 4096 × 4096)."
    )


def test_best_of_others_is_the_faster_of_both_sources(results):
    known, beside, nowhere = (4096, 5120, 1280), (16, 4096, 4096), (64, 1280, 1280)
    name, value = bench_codebook.PEERS_US[known]
    rows = [
        row("", known, "fp16", 1.0),
        row("", known, "qcut_w8a8", 1.0),
        row("", known, name, value - 1),
        row("", beside, "gemlite_w8a16", 15.2),
        row("", beside, "humming_w8a16", 10.2),
    ]
    results("peers/bench_linear.csv", rows)
    assert readme_tables.best_peer(known) == f"{readme_tables.us(value - 1)} {name}"
    assert readme_tables.best_peer(beside) == "10.2 humming_w8a16"
    assert readme_tables.best_peer(nowhere) == "–"
    rows[2]["median_us"] = value + 1
    results("peers/bench_linear.csv", rows)
    assert readme_tables.best_peer(known) == f"{readme_tables.us(value)} {name}"


def test_kernel_rates_are_those_with_dependent_launch(results):
    rows = []
    for m in readme_tables.KERNEL_TOKENS:
        for n, k in bench_codebook.NK:
            for scheme in ("codebook4", "codebook4_int8", "w8a16"):
                rows += [
                    row("kernel", (m, n, k), f"{scheme}:{launch}", us) for launch, us in (("plain", 3), ("pdl", 2))
                ]
            rows[-6]["gb_s"] = 1.0
    results("bench_codebook.csv", rows)
    lines = readme_tables.codebook_kernel_table().splitlines()
    assert len(lines) == 2 + len(readme_tables.KERNEL_TOKENS) * len(bench_codebook.NK)
    assert lines[2] == "| 1 × 14336 × 4096 | 3.00 / 2.00 | – | 2240 | 50 % | 3.00 / 2.00 | 3.00 / 2.00 | – |"
