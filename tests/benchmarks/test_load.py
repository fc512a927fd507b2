"""Benchmarks of quantizing, loading and the first use on the CPU, at their smallest size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import read_rows
from benchmarks.load import first_use, install, memory, quantize


def test_every_scheme_and_fit_gets_a_row(tmp_path: Path) -> None:
    words = ["--size", "tiny", "--device", "cpu", "--schemes", "codebook4,int4", "--fits", "nearest,fitted"]
    assert quantize.main([*words, "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "bench_quantize.csv")
    assert [(row["scheme"], row["fit"]) for row in rows] == [
        (scheme, fit) for scheme in ("codebook4", "int4") for fit in ("nearest", "fitted")
    ]
    assert all(float(row["seconds"]) > 0 for row in rows)


QUANTIZING, FOREIGN = list(memory.DOORS)[:2]


def test_one_layer_of_float_weights_at_a_time() -> None:
    found = dict(memory.measured("tiny", "w8a8", [QUANTIZING, FOREIGN]))
    width, hidden, blocks = memory.SIZES["tiny"]
    in_layers = blocks * (4 * width**2 + 3 * width * hidden)
    in_float = 2 * (2 * memory.VOCABULARY * width + in_layers)
    for door, one in found.items():
        assert one.model < 0.6 * in_float
        assert 0.8 * one.model < one.anonymous < one.model + 3 * one.float_layer, (door, one)
    # The float model next to the quantized one would take more than that, and so would all of GPTQ's tensors.
    assert in_float > 3 * found[QUANTIZING].float_layer
    assert in_layers // 2 > 3 * found[FOREIGN].float_layer
    # Its pages are mapped, and are the system's to drop.
    assert found[QUANTIZING].mapped > 0.8 * in_float


def test_a_process_of_its_own_reports_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first_use.main(["--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (row,) = read_rows(tmp_path / "bench_first_use.csv")
    times = ("quantize_s", "engine_s", "prompt_s", "longest_wait_s", "total_s", "take_over_s")
    assert all(float(row[name]) >= 0 for name in times)
    parts = sum(float(row[name]) for name in times[:3])
    assert parts <= float(row["total_s"]) + 0.005
    assert float(row["prompt_s"]) <= float(row["longest_wait_s"]) + 0.005
    assert (row["build"], row["scheme"]) == ("background", "w8a8")
    assert "longest_wait_s" in capsys.readouterr().out


def test_files_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 1000)
    empty = install.disk_bytes(tmp_path)
    (tmp_path / "two").hardlink_to(tmp_path / "a" / "one")
    assert install.disk_bytes(tmp_path) == empty
    (tmp_path / "three").write_bytes(b"x" * 500)
    assert install.disk_bytes(tmp_path) == empty + 500
