"""The benchmark of the portable path without a GPU: its shapes, its rows, what is to be reached."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from benchmarks import bench_portable, tables
from benchmarks.harness import CheckError, Environment, Results, Timing
from benchmarks.reporting.rows import Rows
from benchmarks.shapes import Shape

H200 = Environment("NVIDIA H200", "580", "13.0", "2.11", "abc")


def timing(us: float) -> Timing:
    return Timing(us, us, us, 5)


def test_shapes() -> None:
    shapes = bench_portable.shapes_of((1, 8), (4096,), quick=False)
    assert len(shapes) == 3 * len(bench_portable.NK) > 0
    assert bench_portable.shapes_of((1,), (), quick=True) == [Shape(1, *bench_portable.NK[0])]


def test_rows_and_what_is_to_be_reached() -> None:
    results = Results("bench_portable", H200)
    for m, fused, portable in ((1, 10.0, 16.0), (8, 10.0, 25.0), (4096, 300.0, 400.0)):
        timings = {"w8a8:fused": timing(fused), "w8a8:portable": timing(portable)}
        bench_portable.add_rows(results, Shape(m, 4096, 4096), timings)
    bench_portable.add_rows(results, Shape(1, 4096, 4096), {"codebook4:portable": timing(9.0)})
    assert [row["x_fused"] for row in results.rows[:6]] == [1.0, 0.625, 1.0, 0.4, 1.0, 0.75]
    assert math.isnan(float(str(results.rows[6]["x_fused"])))
    assert bench_portable.summary(results.rows).splitlines() == [
        "w8a8, few: at least 0.40 of the fused path (to reach 0.5): NOT reached",
        "w8a8, prompts: at least 0.75 of the fused path (to reach 0.7): reached",
    ]


def test_a_wrong_result_is_refused() -> None:
    layer = qcut.Linear.from_float(torch.nn.Linear(32, 16), "w8a8")
    x = torch.randn(2, 32)
    want = layer(x)
    bench_portable.checks("explicit", "w8a8", layer, x, want)()
    for scheme, factor in (("w8a8", 1 + 2.0**-20), ("w8a16", 1.01)):
        with pytest.raises(CheckError, match="relative error"):
            bench_portable.checks("explicit", scheme, layer, x, factor * want)()


def test_calls_take_the_path() -> None:
    seen: list[Any] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(bench_portable.qcut.ops.paths.path.name)
        return x

    bench_portable.on_path("portable", [layer], torch.zeros(1))(0)
    assert seen == ["portable"]


def test_the_table_of_the_notes(tmp_path: Path) -> None:
    assert tables.portable(Rows(tmp_path)) == "Not measured: there are no rows in `bench_portable.csv`."
    results = Results("bench_portable", H200)
    for scheme, m, us in (("w8a8", 4096, 400.0), ("w8a8", 1, 16.04), ("codebook4", 1, 20.0)):
        timings = {f"{scheme}:fused": timing(10.0), f"{scheme}:portable": timing(us)}
        bench_portable.add_rows(results, Shape(m, 512, 256), timings)
    results.write_csv(tmp_path)
    assert tables.portable(Rows(tmp_path)).splitlines() == [
        "| M × N × K | w8a8 | codebook4 |",
        "| --- | --- | --- |",
        "| 1 × 512 × 256 | 16.0 (0.62×) | 20.0 (0.50×) |",
        "| 4096 × 512 × 256 | 400 (0.03×) | – |",
    ]
