"""The benchmarks' measuring core, with a clock that needs no GPU; and what of the benchmarks runs on a CPU."""

from __future__ import annotations

import csv
import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bench_cliff,
    bench_gemm,
    bench_linear,
    bench_model,
    bench_overhead,
    device_kernels,
    harness,
    peers,
    plots,
    shapes,
)
from benchmarks.harness import CheckError, Timing, Variant
from qcut.emitters.families import INT8_CUTLASS
from qcut.emitters.gemm.cutlass.tiles import SM90_MENU
from qcut.numerics import int8 as numerics
from qcut.tuning import cublaslt
from tests.gpu.support.problems import ALIGNED_SHAPES, GEMM_EPILOGUES, gpu_test_calls, gpu_test_problems

BENCHES = (bench_cliff, bench_gemm, bench_linear, bench_model, bench_overhead)


class FakeClock:
    """Replays cost what their calls cost, and a little more with every replay: the GPU grows warm."""

    def __init__(self, cost_us: dict[str, float], drift: float = 0.0, refuses: str = "") -> None:
        self.cost_us, self.drift, self.refuses = cost_us, drift, refuses
        self.done: list[tuple[str, int]] = []
        self.replays: list[str] = []

    def variant(self, name: str, copies: int = 1) -> Variant:
        return Variant(name, lambda i: self.done.append((name, i)), copies)

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        before = len(self.done)
        body()
        if any(name == self.refuses for name, _ in self.done[before:]):
            raise RuntimeError("operation not permitted when stream is capturing\nsecond line")
        return body

    def time_us(self, replay: Callable[[], object]) -> float:
        before = len(self.done)
        replay()
        names = [name for name, _ in self.done[before:]]
        self.replays.append(names[0])
        return sum(self.cost_us[name] for name in names) * (1 + self.drift * len(self.replays))


def test_percentiles_interpolate() -> None:
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 1.8, 4.2, 5)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_geomean() -> None:
    assert harness.geomean([0.5, 2.0, 1.0, 8.0]) == pytest.approx(8.0**0.25)
    assert math.isnan(harness.geomean([]))


def test_measure_reports_time_per_call_and_rotates_over_all_copies() -> None:
    clock = FakeClock({"a": 4.0, "b": 10.0})
    timings = harness.measure([clock.variant("a", 3), clock.variant("b")], clock, rounds=5, target_us=100)
    assert timings == {"a": Timing(4.0, 4.0, 4.0, 5), "b": Timing(10.0, 10.0, 10.0, 5)}
    used = [i for name, i in clock.done if name == "a"]
    assert {used.count(i) for i in range(3)} != {0}
    graph = used[-24:]  # the last replay: 100 µs of 4 µs calls, rounded to a multiple of three copies
    assert graph == [0, 1, 2] * 8


def test_variants_take_turns_and_the_first_place_moves_on() -> None:
    clock = FakeClock(dict.fromkeys("abc", 1.0))
    harness.measure([clock.variant(n) for n in "abc"], clock, rounds=4)
    assert clock.replays[-12:] == list("abc" + "bca" + "cab" + "abc")


def test_variants_that_settle_run_by_themselves() -> None:
    clock = FakeClock({"a": 4.0, "b": 10.0})
    timings = harness.measure([clock.variant(n) for n in "ab"], clock, rounds=5, target_us=20, settle_us=100)
    assert {name: t.median_us for name, t in timings.items()} == {"a": 4.0, "b": 10.0}
    assert [t.samples for t in timings.values()] == [5, 5]
    assert "".join(clock.replays[-20:]) == 10 * "a" + 10 * "b"  # 100 us of graphs of 20, and five samples


def test_drift_meets_all_variants_alike() -> None:
    clock = FakeClock({"a": 5.0, "b": 5.0}, drift=0.01)
    a, b = harness.measure([clock.variant("a"), clock.variant("b")], clock, rounds=20).values()
    assert a.p80_us - a.p20_us > 1.0
    # One after the other, the medians would differ by 20 steps of 0.05 µs; taking turns, by about one.
    assert a.median_us == pytest.approx(b.median_us, abs=0.1)


def test_uncapturable_variant_is_timed_eagerly_and_says_why() -> None:
    said: list[str] = []
    clock = FakeClock({"a": 4.0, "b": 10.0}, refuses="b")
    timings = harness.measure([clock.variant("a"), clock.variant("b")], clock, rounds=3, report=said.append)
    assert [t.mode for t in timings.values()] == ["graph", "eager"]
    assert timings["b"].median_us == 10.0
    assert said == ["b: timed without a CUDA graph: operation not permitted when stream is capturing"]


def test_variant_may_ask_not_to_be_captured() -> None:
    clock = FakeClock({"a": 4.0}, refuses="a")
    eager = Variant("a", clock.variant("a").call, graph=False)
    assert harness.measure([eager], clock, rounds=3, report=pytest.fail)["a"].mode == "eager"


@pytest.mark.parametrize(("late_after", "samples"), [(0, 3), (6, 6), (99, 9)])
def test_deadline_cuts_rounds_but_not_below_the_minimum(late_after: int, samples: int) -> None:
    clock = FakeClock({"a": 1.0})
    ticks = iter(range(3, 99))
    timing = harness.measure(
        [clock.variant("a")], clock, rounds=9, min_rounds=3, deadline=late_after - 0.5, now=lambda: next(ticks)
    )
    assert timing["a"].samples == samples


@pytest.mark.parametrize(
    ("estimate", "copies", "calls"),
    [(5.0, 1, 400), (20.0, 1, 100), (1e6, 1, 1), (1e6, 7, 7), (20.0, 30, 90), (0.0, 157, 471)],
)
def test_calls_per_graph(estimate: float, copies: int, calls: int) -> None:
    assert harness.plan_calls(estimate, copies) == calls


def test_rotation_exceeds_the_budget_and_is_bounded() -> None:
    assert harness.rotation(1280 * 1280) * 1280 * 1280 >= harness.ROTATE_BYTES
    assert harness.rotation(1 << 40) == 1
    assert harness.rotation(0) == harness.MAX_COPIES


def test_cpu_time_per_call_leaves_out_the_first_rounds() -> None:
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.0 + 4e-6, 3.0, 3.0 + 8e-6])
    waits: list[int] = []
    timing = harness.cpu_us(lambda: None, calls=2, rounds=2, settle=lambda: waits.append(1), now=lambda: next(times))
    assert timing.median_us == pytest.approx(3.0, rel=1e-6)
    assert (timing.samples, timing.mode, len(waits)) == (2, "cpu", 5)


def test_wrong_results_are_reported_and_not_timed() -> None:
    def fail() -> None:
        raise CheckError("3 of 4 elements differ")

    said: list[str] = []
    right, unchecked = Variant("right", lambda i: None, check=lambda: None), Variant("unchecked", lambda i: None)
    good, wrong = harness.checked([right, Variant("bad", lambda i: None, check=fail), unchecked], said.append)
    assert (good, wrong) == ([right, unchecked], ["bad"])
    assert said == ["WRONG bad: 3 of 4 elements differ"]


@pytest.mark.parametrize(("gpu", "floor_pct"), [("NVIDIA H200", 51.0), ("another", math.nan)])
def test_a_gemms_row_has_its_rates(gpu: str, floor_pct: float) -> None:
    results = harness.Results("some", harness.Environment(gpu, "", "", "", ""))
    timing = harness.Timing(2.0, 1.9, 2.1, 5)
    shape = shapes.Shape(1000, 1000, 1010)
    row = results.add_gemm(timing, shape, "mine", 3.03e6, 8, kernel="k")
    assert list(row)[:8] == ["bench", "m", "n", "k", "variant", "tops", "gb_s", "floor_pct"]
    assert (row["tops"], row["gb_s"], row["kernel"]) == (1010.0, 1515.0, "k")
    assert row["floor_pct"] == pytest.approx(floor_pct, nan_ok=True)


def test_csv_rows_carry_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_COMMIT", "abc123")
    results = harness.Results("bench", harness.environment())
    results.add(Timing(1.0, 0.5, 2.0, 7), m=1, kernel="k")
    results.add(Timing(3.0, 3.0, 3.0, 1, "eager"), m=2, note="late column")
    path = results.write_csv(tmp_path / "new")
    rows = list(csv.DictReader(path.open(newline="")))
    assert [r["median_us"] for r in rows] == ["1.0", "3.0"]
    assert rows[0]["kernel"] == "k"
    assert rows[0]["note"] == ""
    assert {r["commit"] for r in rows} == {"abc123"}
    assert {r["torch"] for r in rows} == {torch.__version__}
    assert {"gpu", "driver", "cuda", "mode", "p20_us", "p80_us", "samples"} <= rows[0].keys()
    assert [p.name for p in path.parent.iterdir()] == ["bench.csv"]


def test_kernel_names_fill_only_empty_cells_of_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_kernels, "kernel_names", lambda calls: {name: f"ran_{call()}" for name, call in calls.items()}
    )
    results = harness.Results("bench", harness.environment())
    for m, name, kernel in ((1, "ours", "known"), (1, "theirs", ""), (2, "theirs", "")):
        results.add(Timing.of([1.0]), m=m, n=1, k=1, variant=name, kernel=kernel)
    variants = [Variant(name, lambda i: i) for name in ("ours", "theirs", "not timed")]
    device_kernels.name_rows(results, shapes.Shape(1, 1, 1), variants)
    assert [row["kernel"] for row in results.rows] == ["known", "ran_0", ""]


def test_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    ceiling = harness.CEILINGS["NVIDIA H200"]
    decode, prompt = shapes.Shape(1, 14336, 4096), shapes.Shape(4096, 14336, 4096)
    assert ceiling.floor_us(decode.ops, decode.bytes_moved(16, 8, 16)) == pytest.approx(13.1, abs=0.05)
    assert ceiling.floor_us(prompt.ops, prompt.bytes_moved(8, 8, 8)) == pytest.approx(prompt.ops / 1979e6)


def test_table_aligns_and_shows_missing_numbers() -> None:
    text = harness.table(["name", "µs"], [["a", 1234.56], ["long", math.nan], ["c", 0.98765]])
    assert text.splitlines() == ["name      µs", "   a  1234.6", "long       -", "   c   0.988"]


@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.__name__.removeprefix("benchmarks."))
def test_without_a_gpu_a_clear_message_and_status_2(
    bench: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        bench.main(["--out", str(tmp_path)])  # type: ignore[attr-defined]
    assert stop.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_shapes_are_the_published_ones() -> None:
    every = shapes.gemm_shapes()
    assert len(every) == len(set(every)) == 38
    assert sum(s.m >= shapes.CLAIM_MIN_TOKENS for s in every) == 31
    assert set(shapes.gemm_shapes(quick=True)) <= set(every)
    linear = shapes.linear_shapes()
    assert len(linear) == len(set(linear))
    assert {shapes.Shape(m, n, k) for m in (4096, 8192) for n, k in shapes.GPT2_LARGE_NK} <= set(linear)
    assert bench_linear.HEADLINE[0] in linear
    assert set(shapes.linear_shapes(quick=True)) <= set(linear)


@pytest.mark.parametrize("output", list(bench_gemm.OUTPUTS))
def test_gemm_oracle_and_reference_agree_bitwise(output: str) -> None:
    """Two derivations of the epilogue: the benchmark's, and the one that kernels are tested against."""
    data = bench_gemm.Operands.random(shapes.Shape(33, 48, 272), device="cpu", copies=2)
    dtype = bench_gemm.OUTPUTS[output]
    expected = data.expected(dtype)
    assert expected.unique().numel() > 100
    for i in range(2):
        bench_gemm.require_equal(data.qcut(dtype)(i), expected)
    assert torch.equal(data.acc, data.a.int() @ data.b[0].int().t())
    assert torch.equal(data.colsum, numerics.colsum_ref(data.b[0]))


def test_checks_catch_one_wrong_element_and_nan() -> None:
    x = torch.zeros(4, 4, dtype=torch.int8)
    y = x.clone()
    y[3, 3] = 1
    with pytest.raises(CheckError, match="1 of 16 elements"):
        bench_gemm.require_equal(y, x)
    with pytest.raises(CheckError, match=r"int8 \(4, 4\) instead"):
        bench_gemm.require_equal(x, x.half())
    ones = torch.ones(8, dtype=torch.double)
    bench_gemm.require_close(ones + 1e-4, ones, 1e-3)
    for bad in (ones * 1.01, ones * math.nan):
        with pytest.raises(CheckError, match="relative error"):
            bench_gemm.require_close(bad, ones, 1e-3)
    bench_model.check_logits(ones, ones * 2)
    with pytest.raises(CheckError, match="cosine"):
        bench_model.check_logits(ones, ones * math.nan)


def test_summary_counts_only_the_claims_shapes_and_judges_both_figures() -> None:
    ratios = {
        shapes.Shape(16, 4096, 4096): {"qcut_s8": 0.1},
        shapes.Shape(64, 4096, 4096): {"qcut_s8": 2.0},
        shapes.Shape(1024, 4096, 4096): {"qcut_s8": 0.8},
        shapes.Shape(4096, 4096, 4096): {"fp16": 1.0},
    }
    text = bench_gemm.summary(ratios, ["s8", "f16"])
    assert "2 shapes with M >= 64: geometric mean 1.265x" in text
    assert "worst 0.800x at 1024x4096x4096 (to reach 0.85): NOT reached" in text
    assert "f16 output: nothing measured" in text
    ratios[shapes.Shape(1024, 4096, 4096)] = {"qcut_s8": 0.9}
    assert bench_gemm.summary(ratios, ["s8"]).endswith(": reached")


def test_rows_of_some_schemes_leave_those_of_others(tmp_path: Path) -> None:
    def results(commit: str, *variants: str) -> harness.Results:
        found = harness.Results("bench_linear", harness.Environment("GPU", "1", "13.0", "2.11", commit))
        for name in variants:
            found.add(Timing(1.0, 1.0, 1.0, 3, "graph"), m=1, n=2, k=3, variant=name, kernel="")
        return found

    bench_linear.write(results("old", "fp16", "qcut_w8a8", "qcut_int16x8"), tmp_path, whole=True)
    path = bench_linear.write(results("new", "fp16", "qcut_int16x8"), tmp_path, whole=False)
    rows = {row["variant"]: row["commit"] for row in harness.read_rows(path)}
    assert rows == {"fp16": "old", "qcut_w8a8": "old", "qcut_int16x8": "new"}
    bench_linear.write(results("new", "fp16", "qcut_w8a8"), tmp_path, whole=True)
    assert {row["commit"] for row in harness.read_rows(path)} == {"new"}


@pytest.mark.parametrize("scheme", bench_linear.SCHEMES)
def test_linear_variant_is_within_the_benchmarks_tolerance(scheme: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 64, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=512**-0.5)
    x = torch.randn(33, 512).half()
    reference = x.double() @ linear.weight.double().t() + linear.bias.double()
    layer = bench_linear.qcut_layer(linear, scheme, x)
    check = bench_linear.variant(f"qcut_{scheme}", [layer], x, reference).check
    assert check is not None
    check()
    layer.weight_scale *= 1.1
    if scheme == "w8a8_static":
        layer.col_scale *= 1.1
    with pytest.raises(CheckError):
        check()


def test_cublaslt_structure_has_the_librarys_layout() -> None:
    result = cublaslt.HeuristicResult
    assert ctypes.sizeof(result) == 96
    assert [getattr(result, f).offset for f in ("algo", "workspace_bytes", "state", "waves", "reserved")] == [
        0,
        64,
        72,
        76,
        80,
    ]


def test_peers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "gemlite" else None)
    assert set(peers.installed()) == {"gemlite_w8a8", "gemlite_w8a16"}


def test_plot_is_written_as_svg_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.ratios(tmp_path / "plot", ["a", "b"], {"x": [1.0, 2.0], "y": [math.nan, 0.5]}, "title", "speed")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()


def test_gpu_tests_kernels_are_distinct_and_can_be_emitted() -> None:
    problems = gpu_test_problems()
    assert len({p.name for p in problems}) == len(problems) == len(GEMM_EPILOGUES) + 1
    assert {e for e, *_ in gpu_test_calls()} == {p.epilogue for p in problems}
    assert all(n % 16 == 0 and k % 16 == 0 for _, n, k in ALIGNED_SHAPES)
    for problem in problems:
        assert INT8_CUTLASS.emit(problem, SM90_MENU[0], "sm_90a").name
