"""The benchmark of all-reduces: two processes on the CPU, whole, and what it refuses."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_allreduce
from benchmarks.harness import ROOT, CheckError

SCRIPT = ROOT / "benchmarks" / "bench_allreduce.py"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in told.items()}}


def test_two_processes_write_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, given = free_port(), ["--device", "cpu", "--quick", "--out", str(tmp_path), "--sizes", "256", "1024"]
    other = subprocess.Popen([sys.executable, str(SCRIPT), *given], env=environment(1, 2, port), stdout=subprocess.PIPE)
    try:
        for name, value in environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        assert bench_allreduce.main(given) == 0
        assert other.communicate(timeout=60)[0] == b""
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0
    assert "2 of 2 measured, 0 wrong sums" in capsys.readouterr().out
    with (tmp_path / "bench_allreduce.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["gpus"], row["bytes"], row["variant"], row["backend"]) for row in rows] == [
        ("2", "256", "eager", "gloo"),
        ("2", "1024", "eager", "gloo"),
    ]
    assert all(float(row["median_us"]) > 0 and row["gpu"] == "none" for row in rows)


@pytest.fixture
def alone(tmp_path: Path) -> object:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.empty(100, dtype=torch.float16)
    bench_allreduce.check(buffer)
    right = dist.all_reduce

    def off_by_one(tensor: torch.Tensor) -> None:
        right(tensor)
        tensor[7] += 1

    monkeypatch.setattr(bench_allreduce.dist, "all_reduce", off_by_one)
    with pytest.raises(CheckError, match="1 of 100 sums of 1 processes are wrong"):
        bench_allreduce.check(buffer)


@pytest.mark.usefixtures("alone")
def test_samples_are_of_as_many_sums_captured_or_not() -> None:
    class Counting(bench_allreduce.HostClock):
        captured = 0

        def capture(self, body: object) -> object:  # type: ignore[override]
            self.captured += 1
            return body

        def time_us(self, replay: object) -> float:
            replay()  # type: ignore[operator]
            return 300.0

    starts: list[int] = []
    clock, buffer = Counting(), torch.zeros(64, dtype=torch.float16)
    for variant, captured in (("eager", 0), ("graph", 1)):
        starts.clear()
        timing = bench_allreduce.timed(buffer, variant, 3, clock, lambda: starts.append(1))
        assert timing.median_us == pytest.approx(300 / bench_allreduce.calls_of(buffer.nbytes))
        assert (timing.samples, timing.mode, len(starts), clock.captured) == (3, variant, 3, captured)
    with pytest.raises(RuntimeError, match="no CUDA graphs"):
        bench_allreduce.timed(buffer, "graph", 1, bench_allreduce.HostClock())


def test_sizes_calls_and_rates() -> None:
    assert (bench_allreduce.SIZES[0], bench_allreduce.SIZES[-1]) == (8 << 10, 64 << 20)
    calls = [bench_allreduce.calls_of(size) for size in bench_allreduce.SIZES]
    assert calls == sorted(calls, reverse=True)
    assert (calls[0], calls[-1]) == (100, 10)
    assert bench_allreduce.bus_gb_s(4, 1_000_000, 10.0) == pytest.approx(150.0)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in bench_allreduce.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    given = ["--device", "cpu"]
    for told, arguments, message in (
        (0, given, "no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start it by torchrun"),
        (1, given, "one process has nothing to add up"),
        (2, [*given, "--sizes", "7"], "--sizes 7: a positive even number"),
    ):
        for name, value in environment(0, told, 1).items() if told else ():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stopped:
            bench_allreduce.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
