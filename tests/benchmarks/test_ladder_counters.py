"""The ladder's hardware counters: ncu's command line, its CSV, and what happens where it is missing or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ladder import counters
from benchmarks.ladder.counters import METRICS, CountersError

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(launch: int, kernel: str, metric: str, value: str) -> str:
    where = f'"{launch}","77","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(32, 32, 1)","0","9.0"'
    return f'{where},"Command line profiler metrics","{metric}","","{value}"'


SAMPLE = "\n".join(
    (
        "==PROF== Connected to process 77 (/usr/bin/python3.12)",
        '==PROF== Profiling "qcut_ladder_x": 0%....50%....100% - 9 passes',
        HEADER,
        line(0, "qcut_ladder_x", "memory_l1_wavefronts_shared", "1,572,864"),
        line(0, "qcut_ladder_x", "memory_l1_wavefronts_shared_ideal", "524,288"),
        line(0, "qcut_ladder_x", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "(!) n/a"),
        line(0, "qcut_ladder_x", "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active", "41.25"),
        line(0, "qcut_ladder_x", "launch__registers_per_thread", "96"),
        line(1, "void gemm<signed char>(Params<int, 2>)", "launch__registers_per_thread", "168"),
        line(2, "qcut_ladder_x", "launch__registers_per_thread", "1"),
        "==PROF== Disconnected from process 77",
    )
)


def test_parser_reads_the_first_launch_of_each_kernel():
    found = counters.parse(SAMPLE)
    assert list(found) == ["qcut_ladder_x", "void gemm<signed char>"]
    assert found["void gemm<signed char>"] == {"launch__registers_per_thread": 168.0}
    assert counters.columns(found["qcut_ladder_x"]) == {
        "shared_wavefronts": 1572864.0,
        "shared_wavefronts_ideal": 524288.0,
        "tensor_active_pct": 41.25,
        "ncu_registers": 96.0,
        "bank_conflicts": 1048576.0,
    }


def test_parser_finds_nothing_where_there_is_nothing():
    for text in ("", "==ERROR== ERR_NVGPUCTRPERM - no permission\n", HEADER):
        assert counters.parse(text) == {}
    assert counters.columns({}) == {}


def test_unknown_metrics_are_left_out_by_name():
    said = (
        "==ERROR== Failed to find metric regex:^memory_l1_wavefronts_shared(\\.|$)\n"
        "==ERROR== Failed to find metric sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    )
    left = counters.without_unknown(METRICS, said)
    assert set(METRICS) - set(left) == {
        "memory_l1_wavefronts_shared",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    }
    assert counters.without_unknown(METRICS, "==ERROR== something else") == METRICS


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program called ncu on PATH; ``$log`` and ``$metrics`` are the arguments it would read."""
    tool = folder / "ncu"
    arguments = 'case "$1" in --log-file) log=$2;; --metrics) metrics=$2;; esac'
    tool.write_text(f"#!/bin/bash\nwhile [ $# -gt 0 ]; do {arguments}; shift; done\n{script}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_profile_tries_again_without_what_ncu_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sample = tmp_path / "sample.csv"
    sample.write_text(SAMPLE)
    refusal = "==ERROR== Failed to find metric memory_l1_wavefronts_shared"
    fake_ncu(
        tmp_path,
        monkeypatch,
        f'case ",$metrics," in *,memory_l1_wavefronts_shared,*) echo "{refusal}" > $log; exit 1;; esac\n'
        f"cp {sample} $log\n",
    )
    assert counters.profile(["program"]) == counters.parse(SAMPLE)


def test_profile_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_ncu(
        tmp_path, monkeypatch, 'echo "==PROF== x" > $log; echo "==ERROR== ERR_NVGPUCTRPERM - no" >> $log; exit 1\n'
    )
    with pytest.raises(CountersError, match="ERR_NVGPUCTRPERM"):
        counters.profile(["program"])
    fake_ncu(tmp_path, monkeypatch, f"echo '{HEADER}' > $log\n")
    with pytest.raises(CountersError, match="ID"):
        counters.profile(["program"])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(CountersError, match="not on PATH"):
        counters.profile(["program"])


def test_ncu_leaves_the_clocks_alone(tmp_path: Path):
    line = counters.command("ncu", METRICS, tmp_path / "log", ["python3", "x.py"])
    assert line[:3] == ["ncu", "--clock-control", "none"]
    assert line[-2:] == ["python3", "x.py"]
    assert line[line.index("--metrics") + 1].split(",") == list(METRICS)
    assert len(set(METRICS)) == len(METRICS)
