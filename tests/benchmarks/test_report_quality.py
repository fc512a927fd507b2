"""What the report's first part measures, on the CPU: the embedded checkpoint on a few tokens, small layers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import report, report_quality
from benchmarks.codebook_quality import int4
from benchmarks.demo import EMBEDDED, language_reference
from benchmarks.quality import tokens_of
from benchmarks.report_quality import TIMED, int4_bytes, tensor_bytes
from benchmarks.reporting.rows import Rows
from qcut.engine.kv_cache.cache import KV_DTYPES
from qcut.models.evaluation import perplexity


def test_quality_is_measured_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "measure", lambda bench, given: report_quality.main(given))
    given = ["--schemes", "w8a8,codebook2_fit,int4_asymmetric", "--window", "32", "--max-windows", "2"]
    given += ["--calibration-windows", "2", "--device", "cpu"]
    assert report.main(["--run", "a", "--out", str(tmp_path), *given]) == 0
    rows = {(row["scheme"], row["kv_cache"]): row for row in Rows(tmp_path).of("report_quality")}
    assert list(rows) == [
        *((scheme, cache) for scheme in ("float", "w8a8") for cache in KV_DTYPES),
        *(("codebook2_fit", "auto"), ("int4_asymmetric", "auto")),
    ]
    assert [round(float(row["weight_bits"])) for row in rows.values()] == [32] * 4 + [8] * 4 + [2, 4]
    changes = {key: float(row["change_percent"]) for key, row in rows.items()}
    assert changes["float", "auto"] == 0
    assert 0 < abs(changes["float", "int8"]) < 1
    assert 0 < abs(changes["float", "int8/int4"]) < 2
    assert 0 < abs(changes["float", "int4"]) < 5
    fewer_bits = [abs(changes[scheme, "auto"]) for scheme in ("w8a8", "int4_asymmetric", "codebook2_fit")]
    assert fewer_bits == sorted(fewer_bits)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokens = tokens_of(AutoTokenizer.from_pretrained(EMBEDDED), language_reference())
    wanted = perplexity(model, tokens, window=32, max_windows=2, progress=False)
    assert float(rows["float", "auto"]["perplexity"]) == pytest.approx(wanted, rel=1e-4)
    # The cache's own change is against the same weights with a float cache.
    before, after = (float(rows["w8a8", cache]["perplexity"]) for cache in ("auto", "int8"))
    assert float(rows["w8a8", "int8"]["cache_percent"]) == pytest.approx(100 * (after / before - 1), abs=5e-4)
    assert "**gpt2-5m**, 2 windows of 32 tokens of the Python language reference" in report.report(tmp_path)


def test_models_and_names_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given, message in (
        (["--models", str(tmp_path / "no")], "no does not exist"),
        (["--text", str(tmp_path / "no.txt")], "no.txt does not exist"),
        (["--schemes", "w8a8,w5"], "w5 is not one of w8a8, "),
        (["--parts", "speed"], "speed is not one of quality, layers"),
    ):
        with pytest.raises(SystemExit):
            report_quality.main([*given, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_bytes_are_of_what_is_kept() -> None:
    layer = nn.Linear(300, 10)
    assert tensor_bytes([layer, layer]) == 4 * (3000 + 10)
    # Three groups of columns, the last of 44: half a byte a weight, and a float16 and 4 bits for a row of each.
    assert int4_bytes(layer) == 1500 + 10 * 3 * 2.5 + 40
    assert int4_bytes(nn.Linear(300, 10, bias=False)) == 1575
    values = int4(torch.randn(1, 128), symmetric=False)
    assert len(values.unique()) <= 16


class HostClock:
    """Times on the CPU, without graphs."""

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        return body

    def time_us(self, replay: Callable[[], object]) -> float:
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e6


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times small layers on the CPU as if it were a GPU; its status and rows."""
    monkeypatch.setattr(report_quality, "NK", ((64, 128), (96, 64)))
    monkeypatch.setattr(report_quality, "float_layer", lambda n, k: nn.Linear(k, n).half())
    monkeypatch.setattr(report_quality, "copies_of", lambda layer, nbytes: [layer, copy.deepcopy(layer)])
    monkeypatch.setattr(report_quality.harness, "CudaClock", HostClock)

    def run(*given: str) -> tuple[int, list[dict[str, str]]]:
        arguments = ["--parts", "layers", "--device", "cuda", "--quick", "--out", str(tmp_path), *given]
        return report_quality.main(arguments), Rows(tmp_path).of("report_layers")

    return run


def test_layers_of_every_scheme_are_timed(layers: Any) -> None:
    status, rows = layers()
    assert status == 0
    shapes = [("1", "64", "128"), ("16", "64", "128"), ("1", "96", "64"), ("16", "96", "64")]
    assert [(r["m"], r["n"], r["k"], r["variant"]) for r in rows] == [
        (*s, v) for s in shapes for v in ("float", *TIMED)
    ]
    assert not any(name.endswith(("_fit", "_asymmetric")) for name in TIMED)
    nbytes = {row["variant"]: int(row["weight_bytes"]) for row in rows[: len(TIMED) + 1]}
    assert nbytes["float"] == 2 * (64 * 128 + 64)
    assert nbytes["codebook2"] < nbytes["codebook3"] < nbytes["codebook4"] < nbytes["w8a8"] < nbytes["float"]


def test_a_wrong_layer_is_not_timed(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = report_quality.reference_of
    monkeypatch.setattr(report_quality, "reference_of", lambda layer, x: right(layer, x) * 1.05)
    status, rows = layers("--schemes", "w8a16")
    assert status == 1
    assert {row["variant"] for row in rows} == {"float"}


def test_time_ends_the_measuring_of_layers(layers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert layers("--schemes", "w8a16", "--time-budget", "-1") == (0, [])
    assert "out of time before 1 x 64 x 128" in capsys.readouterr().err
