"""The codebook benchmark without a GPU: what it aims at, how it counts bytes, its rows and its summary."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from benchmarks import bench_codebook, harness
from benchmarks.bench_codebook import LAYER_TARGETS, NK, PEERS_US, PROMPTS
from benchmarks.harness import CheckError, Environment, Results, Timing
from benchmarks.shapes import Shape
from qcut.backends.cuda.launch import plans as _launch_plans
from tests.support import fake_bench

H200 = Environment("NVIDIA H200", "580", "13.0", "2.11", "abc")
LARGE = Shape(1, 14336, 4096)


def timing(us: float) -> Timing:
    return Timing(us, us, us, 15)


def measured(*parts: tuple[str, Shape, dict[str, float]]) -> list[dict[str, Any]]:
    results = Results("bench_codebook", H200)
    for part, shape, times in parts:
        bench_codebook.add_rows(results, part, shape, {name: timing(us) for name, us in times.items()}, {})
    return results.rows


def test_kernels_aim_at_a_figure_for_each_launch() -> None:
    aim = bench_codebook.target_us
    assert (aim("kernel", "codebook4:plain", LARGE), aim("kernel", "codebook4:pdl", LARGE)) == (10.3, 9.2)
    assert aim("kernel", "w8a16:pdl", Shape(16, 14336, 4096)) == 18.0
    assert math.isnan(aim("kernel", "codebook4_int8:pdl", LARGE))
    assert math.isnan(aim("kernel", "codebook4:pdl", Shape(2, 14336, 4096)))


def test_few_token_layers_aim_at_the_fastest_other_library() -> None:
    aim = bench_codebook.target_us
    assert aim("layer", "codebook4", Shape(1, 1280, 1280)) == PEERS_US[1, 1280, 1280][1]
    assert aim("layer", "codebook4", LARGE) == 11.5 < PEERS_US[1, 14336, 4096][1]
    assert aim("prompt", "codebook4_int8", Shape(4096, 14336, 4096)) == 400.0
    # More tokens have figures of their own, or none.
    for part, variant, shape in (
        ("layer", "codebook4", Shape(64, 14336, 4096)),
        ("prompt", "codebook4", Shape(1024, 14336, 4096)),
        ("layer", "w8a16", Shape(1, 1280, 1280)),
        ("layer", "fp16", Shape(1, 1280, 1280)),
    ):
        assert math.isnan(aim(part, variant, shape))


def test_every_figure_to_reach_is_measured() -> None:
    few = {(m, n, k) for m in bench_codebook.DECODE_TOKENS for n, k in NK}
    assert {key[1:] for key in bench_codebook.KERNEL_TARGETS} <= few
    assert {key[1:] for key in LAYER_TARGETS} | set(PEERS_US) <= few | set(PROMPTS)


def test_bytes_are_those_of_weights_norms_tokens_and_results() -> None:
    shape = Shape(2, 256, 128)
    n_k, outputs = 256 * 128, 2 * 256 * 2
    moved = bench_codebook.bytes_moved
    assert moved("kernel", "codebook4", shape) == n_k / 2 + 256 * 2 + 2 * 128 * 2 + outputs
    assert moved("kernel", "codebook4_int8", shape) == moved("kernel", "codebook4", shape) - 2 * 128
    assert moved("layer", "codebook4_int8", shape) == moved("layer", "codebook4", shape)
    assert moved("kernel", "w8a16", shape) == n_k + 2 * 128 * 2 + outputs
    assert moved("layer", "fp16", shape) == 2 * n_k + 2 * 128 * 2 + outputs
    layer = qcut.Linear.from_float(torch.nn.Linear(128, 256, bias=False), "codebook4")
    kept = layer.units.nbytes + layer.packed_norms.nbytes
    assert bench_codebook.weight_bytes("codebook4", 256, 128) == kept


def test_rows_state_rate_floor_target_and_kernel(tmp_path: Path) -> None:
    results = Results("bench_codebook", H200)
    timings = {"codebook4:plain": timing(10.0), "codebook4_int8:pdl": timing(12.0)}
    bench_codebook.add_rows(results, "kernel", LARGE, timings, {"codebook4:plain": "qcut_x"})
    with results.write_csv(tmp_path).open(newline="") as file:
        plain, int8 = csv.DictReader(file)
    moved = bench_codebook.bytes_moved("kernel", "codebook4", LARGE)
    assert float(plain["gb_s"]) == pytest.approx(moved / 10 / 1e3, abs=0.05)
    assert float(plain["floor_pct"]) == pytest.approx(100 * moved / 4.48e12 / 10e-6, abs=0.05)
    assert (plain["part"], plain["target_us"], plain["kernel"]) == ("kernel", "10.3", "qcut_x")
    assert (int8["target_us"], int8["kernel"], int8["gpu"]) == ("nan", "", "NVIDIA H200")
    header, line, other = bench_codebook.table(results.rows).splitlines()
    assert header.split()[-2:] == ["to", "reach"]
    assert line.split()[-1] == "10.3"
    assert other.split()[-1] == "-"
    share = float(plain["gb_s"]) / 44.8
    assert float(line.split()[-2]) == pytest.approx(share, abs=0.06)


def test_summary_judges_every_figure_and_names_the_worst_layer() -> None:
    small = Shape(1, 1280, 1280)
    rows = measured(
        ("kernel", LARGE, {"codebook4:plain": 10.3, "codebook4:pdl": 9.3, "w8a16:pdl": 15.0}),
        ("layer", LARGE, {"fp16": 32.0, "codebook4": 11.0, "w8a16": 16.0}),
        ("layer", small, {"fp16": 5.0, "codebook4": 2.9}),
        ("prompt", Shape(256, 14336, 4096), {"fp16": 40.0, "codebook4_int8": 50.0}),
        ("prompt", Shape(4096, 14336, 4096), {"codebook4": 700.0}),
    )
    lines = bench_codebook.summary(rows).splitlines()
    assert lines[:2] == [
        "kernel 1x14336x4096 codebook4:plain: 10.3 us (to reach 10.3): reached",
        "kernel 1x14336x4096 codebook4:pdl: 9.3 us (to reach 9.2): NOT reached",
    ]
    assert "layer 1x1280x1280 codebook4: 2.9 us (to reach 2.5): NOT reached" in lines
    assert "prompt 256x14336x4096 codebook4_int8: 50 us (to reach 40): NOT reached" in lines
    assert "4 of 7 figures reached" in lines
    mean = math.sqrt(32 / 11 * 5 / 2.9)
    assert lines[-3:] == [
        f"layer codebook4: {mean:.3f}x float16 (geometric mean of 2), worst {5 / 2.9:.3f}x at 1x1280x1280",
        "layer w8a16: 2.000x float16 (geometric mean of 1), worst 2.000x at 1x14336x4096",
        "prompt codebook4_int8: 0.800x float16 (geometric mean of 1), worst 0.800x at 256x14336x4096",
    ]


@pytest.mark.parametrize("m", [1, 64, 300])
@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a16"])
def test_rows_name_the_kernel_with_its_bias(scheme: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_launch_plans, "target", lambda device: fake_bench.H200)
    layer = qcut.Linear.from_float(torch.nn.Linear(256, 96), scheme)
    alone, whole = (bench_codebook.kernel_name(layer, m, whole=whole) for whole in (False, True))
    assert alone.startswith("qcut_")
    assert ("s8xc4" in alone, "f16xc4" in alone) == (scheme == "codebook4_int8", scheme == "codebook4")
    rotates = re.search("h(f16)?xc4", whole) is not None
    assert rotates == (scheme != "w8a16" and m == 1)
    same = re.sub("h(f16)?xc4", "xc4", whole.replace("_sn_b", "_sn"))
    # A kernel that rotates chooses by itself whether a CTA has a multiprocessor alone.
    assert same.removesuffix("_a") == alone.removesuffix("_a") if rotates else same == alone
    assert alone != whole


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a16"])
def test_reference_accepts_the_scheme_and_catches_a_wrong_scale(scheme: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 64, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=512**-0.5)
    layer, x = qcut.Linear.from_float(linear, scheme), torch.randn(9, 512).half()
    reference = bench_codebook.reference_of(layer, x) + linear.bias.double()
    call = bench_codebook.calls([layer, layer], x)
    bench_codebook._check(call, reference, bench_codebook.tolerance_of(scheme))
    scales = {"codebook4": "norms", "codebook4_int8": "col_scale", "w8a16": "weight_scale"}
    getattr(layer, scales[scheme]).mul_(1.1)
    with pytest.raises(CheckError):
        bench_codebook._check(call, reference, bench_codebook.tolerance_of(scheme))


def test_without_a_gpu_a_clear_message_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        bench_codebook.main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert harness.parser("").parse_args([]).time_budget == 90
