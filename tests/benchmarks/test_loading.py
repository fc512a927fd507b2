"""Loading takes the memory of the quantized model and of a few layers in float, and no more: measured in bytes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import bench_loading

pytest.importorskip("transformers")

QUANTIZING, FOREIGN = list(bench_loading.DOORS)[:2]


def test_one_layer_of_float_weights_at_a_time() -> None:
    found = dict(bench_loading.measured("tiny", "w8a8", [QUANTIZING, FOREIGN]))
    width, hidden, blocks = bench_loading.SIZES["tiny"]
    in_layers = blocks * (4 * width**2 + 3 * width * hidden)
    in_float = 2 * (2 * bench_loading.VOCABULARY * width + in_layers)
    for door, one in found.items():
        assert one.model < 0.6 * in_float
        assert 0.8 * one.model < one.anonymous < one.model + 3 * one.float_layer, (door, one)
    # The float model beside the quantized one would take more than that, and so would all of GPTQ's tensors.
    assert in_float > 3 * found[QUANTIZING].float_layer
    assert in_layers // 2 > 3 * found[FOREIGN].float_layer
    # Its pages are mapped, and are the system's to drop.
    assert found[QUANTIZING].mapped > 0.8 * in_float


def test_every_door_gets_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(size: str, scheme: str, doors: list[str]) -> list[tuple[str, bench_loading.Loaded]]:
        return [(door, bench_loading.Loaded(8_000_000, 9_000_000, 0, 1_000_000, 0.5)) for door in doors]

    monkeypatch.setattr(bench_loading, "measured", measured)
    assert bench_loading.main(["--out", str(tmp_path)]) == 0
    with (tmp_path / "bench_loading.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["door"], row["anonymous_mb"]) for row in rows] == [(door, "9.0") for door in bench_loading.DOORS]
