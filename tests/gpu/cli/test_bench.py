"""``qcut bench`` on a GPU: speeds through the engine, the memory's peak, and nothing left of measured models."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.cli.commands import DEMO, answer
from tests.gpu.support.oracles import DEVICE

SCHEMES = ("w8a16", "w8a8", "codebook4", "codebook4_int8")
FEW = ("--max-windows", 4, "--prompt-tokens", 64, "--new", 16, "--device", DEVICE)


def test_rows_have_speeds_and_peaks(capfd: pytest.CaptureFixture[str]) -> None:
    got = answer(capfd, "bench", DEMO, "--budget", 0.05, *FEW)
    rows = got["rows"]
    assert [(row["scheme"], row["error"], row["runs_on"]) for row in rows] == [
        (name, "", "qcut") for name in ("float16", *SCHEMES)
    ]
    assert got["gpu"] == torch.cuda.get_device_name(DEVICE)
    for row in rows:
        assert row["first_token_ms"] > 0
        assert row["tokens_per_s"]["8"] > row["tokens_per_s"]["1"] > 0
        assert row["peak_bytes"] > row["weight_bytes"] > 0
        assert abs(row["change"]) < 0.05
        assert row["warm_up_s"] > row["first_token_ms"] / 1e3
    assert rows[0]["weight_bytes"] > rows[1]["weight_bytes"] > rows[3]["weight_bytes"]
    found = got["recommendation"]
    rates = {row["scheme"]: row["tokens_per_s"]["1"] for row in rows}
    assert found["by"] == "speed"
    assert rates[found["scheme"]] >= 0.98 * max(rates.values())


def test_a_scheme_that_the_device_lacks_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Codebooks compute in 16 bits on a GPU."""
    got = answer(capfd, "bench", DEMO, "--schemes", "codebook4", "--dtype", "float32", *FEW)
    assert [row["error"] == "" for row in got["rows"]] == [True, False]
    assert "float32" in got["rows"][1]["error"]
    assert got["recommendation"]["scheme"] == "float32"


def test_measured_models_leave_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    answer(capfd, "bench", DEMO, "--schemes", "w8a8", *FEW)
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    got = answer(capfd, "bench", DEMO, "--schemes", "w8a8,codebook4", *FEW)
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) - before < min(row["weight_bytes"] for row in got["rows"])
