"""The benchmark of early captures without a GPU: what it times, and what it reports as a miss."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_capture


class EagerClock:
    """Captures nothing: a replay calls the body. Replays take 10 µs a call, those of the first body ``slower``."""

    def __init__(self, slower: float) -> None:
        self.slower, self.captured = slower, 0

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        self.captured += 1
        us = 10.0 * bench_capture.CALLS * (self.slower if self.captured == 1 else 1.0)

        def replay() -> float:
            body()
            return us

        body()
        return replay

    def time_us(self, replay: Callable[[], object]) -> float:
        us = replay()
        assert isinstance(us, float)
        return us


@pytest.mark.parametrize(
    ("slower", "changed", "status"), [(1.0, False, 0), (1.02, False, 0), (2.4, False, 1), (1.0, True, 1)]
)
def test_slow_or_wrong_early_graph_is_a_miss(
    slower: float, changed: bool, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factor = [1.0]

    def layer(x: Tensor) -> Tensor:
        return x * factor[0]

    clock = EagerClock(slower)
    late = bench_capture.compare(layer, torch.ones(2), clock, "explicit")
    case = {"scheme": "w8a16", "path": "fused", "m": 1, **late()}
    assert case["same"]
    assert clock.captured == 2
    case["same"] = not changed
    assert bench_capture.report(Namespace(mode="background", out=tmp_path), [case]) == status
    with (tmp_path / "bench_capture.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (float(row["median_us"]), float(row["late_us"]), float(row["x_late"])) == (10 * slower, 10.0, slower)
    assert f"{status} of 1 early graphs" in capsys.readouterr().out
