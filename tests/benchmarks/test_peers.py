"""Layers of other libraries: rounding, what fails at a shape, rows; tables, headline and plot of made-up rows."""

from __future__ import annotations

import csv
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, Environment, Results, Timing, read_rows
from benchmarks.layers import libraries, peers
from benchmarks.layers.libraries import PEERS, Peer
from benchmarks.layers.shapes import Shape
from benchmarks.publish import headline
from benchmarks.publish import peers as pages
from benchmarks.publish.rows import Rows
from tests.support.fakes.clock import FixedClock

H200 = Environment("NVIDIA H200", "580", "13.0", "2.11", "abc123")
PROMPT, TOKEN = (4096, 14336, 4096), (1, 14336, 4096)


def a_linear(n: int = 64, k: int = 256) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False, dtype=torch.float16)
    nn.init.normal_(linear.weight, std=k**-0.5)
    return linear.requires_grad_(False)


def method(name: str, layer: Callable[[Tensor], Tensor], linear: nn.Linear) -> peers.Method:
    limits = (0.03, 2.0 * linear.weight.numel(), 16)
    return peers.Method(name, "1.0", torch.float16, [layer, layer], lambda: linear.weight, *limits)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────


def test_4_bit_weights_are_rounded_and_packed() -> None:
    weight = a_linear().weight
    codes, scale = libraries.rounded4(weight)
    decoded = (codes.float() - 8) * scale.float().repeat_interleave(libraries.GROUP, 1)
    steps = scale.float().repeat_interleave(libraries.GROUP, 1)
    assert ((decoded - weight).abs() <= 0.51 * steps).all()
    assert (int(codes.min()), int(codes.max())) == (1, 15)
    words = libraries.packed4(codes).long()
    for i in range(8):
        assert torch.equal((words >> 4 * i & 15).t().to(torch.uint8), codes[:, i::8])


def test_missing_library_is_known_without_its_import() -> None:
    there = Peer("pytest", "pytest", "pytest", libraries.W8A8, lambda linear: linear)
    absent = Peer("none", "no_such_package", "no-such-package", libraries.W8A8, lambda linear: linear)
    assert (there.is_installed(), there.version()) == (True, pytest.__version__)
    assert (absent.is_installed(), absent.version()) == (False, "unknown")


def test_every_library_has_a_method() -> None:
    wanted = {"bitsandbytes", "torchao", "gemlite", "Humming", "exllamav3", "Marlin", "Machete", "vLLM", "torch"}
    assert {peer.library for peer in PEERS.values()} == wanted
    assert set(peers.METHODS) >= PEERS.keys()


@pytest.mark.parametrize("name", [peers.BASELINE, *(peers.OURS + scheme for scheme in peers.SCHEMES)])
def test_own_layers_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.harness, "rotation", lambda nbytes: 2)
    linear = a_linear()
    with torch.no_grad():
        made = peers.own_method(linear, name)
        assert len(made.layers) == 2
        assert made.moved > 0
        timings, reasons = peers.measured(Shape(9, 64, 256), [made], FixedClock(1.0), 60, rounds=3)
        assert (list(timings), reasons) == ([name], {})
        wrong = peers.Method(**{**made.__dict__, "layers": [lambda x: 1.1 * made.layers[0](x)] * 2})
        timings, reasons = peers.measured(Shape(9, 64, 256), [wrong], FixedClock(1.0), 60)
        assert not timings
        assert reasons[name].startswith("CheckError: relative error")


def test_failing_method_has_a_reason() -> None:
    linear = a_linear()

    def fails(x: Tensor) -> Tensor:
        raise ValueError("16 tokens at least\nand more")

    def takes_long(x: Tensor) -> Tensor:
        time.sleep(5)
        return linear(x)

    found = [method(name, layer, linear) for name, layer in (("a", linear), ("b", fails), ("c", takes_long))]
    timings, reasons = peers.measured(Shape(3, 64, 256), found, FixedClock(1.0), 0.2, rounds=3)
    assert list(timings) == ["a"]
    assert reasons == {
        "b": "ValueError: 16 tokens at least and more",
        "c": "a first call took more than 0 s",
    }


def test_unbuilt_method_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(linear: nn.Linear) -> Any:
        raise ImportError("no library")

    monkeypatch.setattr(peers.harness, "rotation", lambda nbytes: 2)
    monkeypatch.setitem(PEERS, "broken", Peer("broken", "json", "json", libraries.W8A8, build))
    found, reasons = peers.methods_of(a_linear(), ["broken"], 60)
    assert [one.name for one in found] == [peers.BASELINE]
    assert reasons == {"broken": "ImportError: no library"}


def test_rows_have_float16_or_a_reason(tmp_path: Path) -> None:
    linear, shape = a_linear(), Shape(3, 64, 256)
    results = Results(peers.BENCH, H200)
    found = {name: method(name, linear, linear) for name in (peers.BASELINE, "qcut_w8a8")}
    timings = {name: Timing(us, us, us, 3) for name, us in ((peers.BASELINE, 6.0), ("qcut_w8a8", 3.0))}
    peers.add_rows(results, shape, found, timings, {"gemlite_w8a8": "TypeError: no"}, {"qcut_w8a8": "a+b"})
    half, own, other = read_rows(results.write_csv(tmp_path, peers.KEY))
    assert (half["x_fp16"], half["dtype"], half["version"]) == ("1.0", "float16", "1.0")
    assert (own["fp16_us"], own["x_fp16"], own["kernel"], own["reason"]) == ("6.0", "2.0", "a+b", "")
    assert (other["variant"], other["median_us"], other["reason"]) == ("gemlite_w8a8", "", "TypeError: no")
    assert all(row["gpu"] == "NVIDIA H200" for row in (half, own, other))


def test_summary_names_the_fastest_of_each_side() -> None:
    rows = [
        row("fp16", TOKEN, 30.0),
        row("qcut_w8a8", TOKEN, 10.0),
        row("vllm_w8a8", TOKEN, 8.0),
        row("torch_fp8", TOKEN),
    ]
    assert peers.summary(rows).splitlines()[-1] == "1 tokens: qcut_w8a8 10.0, vllm_w8a8 8.0: 0.80x"


# ── publishing ───────────────────────────────────────────────────────────────────────────────────


def row(variant: str, shape: tuple[int, int, int], us: float | None = None, version: str = "1.0") -> dict[str, str]:
    m, n, k = map(str, shape)
    timed = (
        {"median_us": "", "reason": "RuntimeError: 17 tokens"} if us is None else {"median_us": str(us), "reason": ""}
    )
    return {"bench": peers.BENCH, "variant": variant, "m": m, "n": n, "k": k, "version": version, **timed}


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[list[dict[str, str]]], Rows]:
    """The committed rows, and made-up ones of this benchmark."""

    def write(found: list[dict[str, str]]) -> Rows:
        shutil.copytree(
            RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.svg", f"{peers.BENCH}.csv")
        )
        with (tmp_path / f"{peers.BENCH}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*found[0], *H200.__dict__])
            writer.writeheader()
            writer.writerows({**one, **H200.__dict__} for one in found)
        return Rows(tmp_path)

    return write


MADE_UP = [
    *(row("fp16", shape, us) for shape, us in ((TOKEN, 32.0), (PROMPT, 700.0))),
    *(row("qcut_w8a8", shape, us, "") for shape, us in ((TOKEN, 16.0), (PROMPT, 350.0))),
    row("qcut_codebook4", TOKEN, 8.0, ""),
    *(row("gemlite_w8a8", shape, us, "0.6") for shape, us in ((TOKEN, 20.0), (PROMPT, 500.0))),
    row("vllm_fp8", PROMPT, 280.0, "0.26"),
    row("vllm_fp8", TOKEN, version="0.26"),
]


def test_best_alternative_is_found_in_the_rows(rows: Any) -> None:
    cells = pages.cells(rows(MADE_UP))
    assert cells[TOKEN].ours == ("codebook4", 8.0)
    assert cells[TOKEN].theirs == ("gemlite_w8a8", 20.0)
    assert not cells[TOKEN].is_lost
    assert cells[PROMPT].theirs == ("vllm_fp8", 280.0)
    assert cells[PROMPT].is_lost
    assert pages.best_cell(cells[PROMPT]) == "280 vllm_fp8"
    assert pages.best_cell(None) == "–"


def test_headline_is_of_one_run(rows: Any) -> None:
    text = headline.headline(rows(MADE_UP))
    prompt, token = text.splitlines()[2:4]
    assert prompt.endswith("| 700 | 350 (`w8a8`) | **280** (vLLM) |")
    assert token.endswith("| 32.0 | **8.00** (`codebook4`) | 20.0 (gemlite) |")
    assert "Rows: `bench_peers.csv` (NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, commit abc123)." in text
    assert "gemlite, Humming" not in text


def test_headline_has_dashes_for_what_no_run_has(rows: Any) -> None:
    prompt, token = headline.headline(rows([one for one in MADE_UP if one["m"] != "1"])).splitlines()[2:4]
    assert prompt.endswith("| 700 | 350 (`w8a8`) | **280** (vLLM) |")
    assert token.endswith("| – | – | – |")


def test_headline_shows_where_a_server_is_faster(rows: Any, tmp_path: Path) -> None:
    found = rows(MADE_UP)
    served = read_rows(tmp_path / "bench_vllm.csv")
    for one in served:
        if (one["shape"], one["method"], one["what"], one["batch"]) == ("qwen3-30b-a3b", "vllm fp8", "step", "1"):
            one["tokens_s"] = "400.0"
    with (tmp_path / "bench_vllm.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(served[0]))
        writer.writeheader()
        writer.writerows(served)
    lines = headline.headline(found).splitlines()
    (mixture,) = (line for line in lines if "mixture" in line)
    assert mixture.endswith("| – | 375 (`codebook4`) | **400** (vLLM, fp8) |")
    (dense,) = (line for line in lines if "64 sequences" in line)
    assert dense.count("**") == 2
    (drafted,) = (line for line in lines if "with drafts" in line)
    assert drafted.split("|")[3] > " **2,"


def test_memory_of_others_comes_from_rows(rows: Any, tmp_path: Path) -> None:
    found = rows(MADE_UP)
    served = read_rows(tmp_path / "bench_model.csv")
    plain = next(one for one in served if one["generate_peak_gb"])
    with (tmp_path / "bench_model.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(served[0]))
        writer.writeheader()
        writer.writerows([*served, plain | {"variant": "bitsandbytes_nf4", "generate_peak_gb": "0.55"}])
    assert "0.55 (bitsandbytes)" in headline.headline(found)


def test_tables_show_fastest_lost_and_failed(rows: Any) -> None:
    text = pages.table(rows(MADE_UP))
    assert "14336 × 4096, by tokens:" in text
    assert "| gemlite_w8a8 | 0.6 | 20.0 | 500 |" in text
    assert "| vllm_fp8 | 0.26 | – | **280** |" in text
    assert "| qcut_codebook4 |  | **8.00** | – |" in text
    assert "Another library is the fastest at 1 of 2 shapes: 4096 × 14336 × 4096 (vllm_fp8, 1.25 × as fast)." in text
    assert "- vllm_fp8: 1 × 14336 × 4096 (RuntimeError: 17 tokens)" in text
    assert "NVIDIA H200" in text


def test_tables_say_where_nothing_is_lost(rows: Any) -> None:
    text = pages.table(rows([one for one in MADE_UP if one["variant"] != "vllm_fp8"]))
    assert "No other library is faster than qcut's fastest scheme at any of the 2 shapes." in text
    assert "Without a time" not in text


def test_plot_names_the_card_and_libraries(rows: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    headline.plot(rows(MADE_UP), tmp_path)
    drawn = re.findall("<!-- (.+?) -->", (tmp_path / "headline.svg").read_text())
    assert any("NVIDIA H200" in one for one in drawn)
    assert {"best of gemlite, vLLM", "1 token", "4,096 tokens", "codebook4"} <= set(drawn)
