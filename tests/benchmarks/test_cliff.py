"""The table of the cliff without a GPU: its cells, what they have to reach, rows of several calls, worst first."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_cliff, tables
from benchmarks.bench_cliff import NK, SCHEMES, TOKENS
from benchmarks.harness import CheckError, Environment, Results, Timing, read_rows
from benchmarks.reporting.rows import Rows
from benchmarks.shapes import Shape
from qcut.backends.cuda.launch import plans
from tests.support import fake_bench

H200 = Environment("NVIDIA H200", "580", "13.0", "2.11", "abc")
SMALL, LONG = Shape(1, 1280, 1280), Shape(4096, 4096, 4096)


def timing(us: float) -> Timing:
    return Timing(us, us, us, 5)


def results_of(*cells: tuple[Shape, dict[str, float]], env: Environment = H200) -> Results:
    results = Results("bench_cliff", env)
    for shape, times in cells:
        names = dict.fromkeys(times, "qcut_x")
        bench_cliff.add_rows(results, shape, {name: timing(us) for name, us in times.items()}, names)
    return results


def test_a_default_run_measures_every_cell() -> None:
    options = bench_cliff.options_of([])
    assert len(options.schemes) * len(options.shapes) * len(options.tokens) == 570
    quick = bench_cliff.options_of(["--quick"])
    assert set(quick.shapes) < set(NK)
    assert set(quick.tokens) < set(TOKENS)
    some = bench_cliff.options_of(["--schemes", "w8a8", "--shapes", "64x32", "--tokens", "3", "5"])
    assert (some.schemes, some.shapes, some.tokens) == (["w8a8"], [(64, 32)], [3, 5])


def test_a_shape_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_cliff.options_of(["--shapes", "4096"])
    assert "'4096' is not NxK" in capsys.readouterr().err


def test_long_prompts_of_16_bit_tokens_may_lose_five_percent() -> None:
    assert [bench_cliff.to_reach(scheme, 4096) for scheme in SCHEMES] == [0.97, 0.97, 0.95, 0.95, 0.97]
    assert {bench_cliff.to_reach(scheme, 1024) for scheme in SCHEMES} == {0.97}


def test_a_row_holds_its_float16_and_nothing_is_written_without_one() -> None:
    results = results_of((SMALL, {"fp16": 5.0, "w8a8": 4.0, "codebook4": 10.0}), (LONG, {"w8a8": 80.0}))
    assert [(row["variant"], row["fp16_us"], row["x_fp16"]) for row in results.rows] == [
        ("w8a8", 5.0, 1.25),
        ("codebook4", 5.0, 0.5),
    ]


def test_rows_of_several_calls_make_one_table(tmp_path: Path) -> None:
    results_of((SMALL, {"fp16": 5.0, "w8a8": 4.0}), (LONG, {"fp16": 9.0, "w8a8": 3.0})).write_csv(tmp_path)
    later = Environment("NVIDIA H200", "580", "13.0", "2.11", "def")
    path = results_of((SMALL, {"fp16": 5.0, "w8a8": 2.5}), env=later).write_csv(tmp_path, bench_cliff.KEY)
    cells = {(row["m"], row["x_fp16"], row["commit"]) for row in read_rows(path)}
    assert cells == {("4096", "3.0", "abc"), ("1", "2.0", "def")}
    path = results_of((LONG, {"fp16": 9.0, "w8a8": 3.0})).write_csv(tmp_path)
    assert len(read_rows(path)) == 1, "without a key the file is written anew"


def test_summary_names_the_worst_cell_first(tmp_path: Path) -> None:
    times = {"fp16": 9.0, "w8a8": 9.2, "w8a16": 9.4, "codebook4": 18.0}
    rows = read_rows(results_of((SMALL, times), (LONG, times)).write_csv(tmp_path))
    assert bench_cliff.summary(rows, most=2).splitlines() == [
        "codebook4 1x1280x1280: 0.500x (9.00 / 18.00 us)",
        "codebook4 4096x4096x4096: 0.500x (9.00 / 18.00 us)",
        "... and 1 more",
        "w8a8: 0 of 2 cells too slow, mean 0.978x, least 0.978x",
        "w8a16: 1 of 2 cells too slow, mean 0.957x, least 0.957x",
        "codebook4: 2 of 2 cells too slow, mean 0.500x, least 0.500x",
    ]
    assert bench_cliff.least_by_tokens(rows) == {
        m: {"w8a8": 0.9783, "w8a16": 0.9574, "codebook4": 0.5} for m in (1, 4096)
    }


def test_the_page_lists_every_cell_that_is_too_slow(tmp_path: Path) -> None:
    assert tables.cliff(Rows(tmp_path)) == "Not measured: there are no rows in `bench_cliff.csv`."
    times = {"fp16": 9.0, **dict.fromkeys(SCHEMES, 18.0)}
    results_of(*((Shape(m, 1280, 1280), times) for m in TOKENS)).write_csv(tmp_path)
    page = tables.cliff(Rows(tmp_path))
    assert page.startswith("95 of 95 cells are slower than they should be. The 95 slowest")
    assert page.count("| 9.00 | 18.0 | 0.50× |") == 95
    assert "| 4,096 | 0.50× |" in page


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_name_every_kernel_of_a_call(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "target", lambda device: fake_bench.H200)
    for module in ("linear", "gemm", "codebook", "quantize"):
        monkeypatch.setattr(f"qcut.backends.cuda.{module}.target", lambda device: fake_bench.H200, raising=False)
    names = bench_cliff.kernels(scheme, Shape(64, 1280, 1280), 0).split("+")
    assert len(names) == (1 if scheme == "w8a16" else 2)
    assert all(name.startswith("qcut_") for name in names)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_layer_is_caught(scheme: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 64, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=512**-0.5)
    x = torch.randn(9, 512).half()
    layer: Any = bench_cliff.qcut_layer(linear, scheme, x)
    variant = bench_cliff.variant(scheme, [layer, layer], (x, x.clone()))
    assert variant.check is not None
    with torch.no_grad():
        variant.check()
        right = layer.forward
        layer.forward = lambda t: 1.1 * right(t)
        with pytest.raises(CheckError):
            variant.check()


def test_an_even_number_of_copies_reads_other_tokens_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cliff.harness, "rotation", lambda nbytes: 9)
    layers = bench_cliff.copies_of(torch.nn.Linear(8, 8))
    assert len(layers) == 10
    read: list[int] = []
    first, second = torch.zeros(1, 8), torch.ones(1, 8)
    spies = [lambda t: read.append(int(t.sum()))] * 10
    call = bench_cliff.variant("w8a8", spies, (first, second)).call
    for i in (*range(10), *range(10)):
        call(i)
    assert all(a != b for a, b in itertools.pairwise(read))
