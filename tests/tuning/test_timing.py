"""The measuring core, with a clock that needs no GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pytest
import torch

from qcut.tuning import cublaslt
from qcut.tuning.timing import MAX_COPIES, ROTATE_BYTES, Timing, Variant, WallClock, measure, plan_calls, rotation


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


def test_times_are_per_call_over_all_copies() -> None:
    clock = FakeClock({"a": 4.0, "b": 10.0})
    timings = measure([clock.variant("a", 3), clock.variant("b")], clock, rounds=5, target_us=100)
    assert timings == {"a": Timing(4.0, 4.0, 4.0, 5), "b": Timing(10.0, 10.0, 10.0, 5)}
    used = [i for name, i in clock.done if name == "a"]
    assert {used.count(i) for i in range(3)} != {0}
    graph = used[-24:]  # the last replay: 100 µs of 4 µs calls, rounded to a multiple of three copies
    assert graph == [0, 1, 2] * 8


def test_variants_take_turns() -> None:
    clock = FakeClock(dict.fromkeys("abc", 1.0))
    measure([clock.variant(n) for n in "abc"], clock, rounds=4)
    assert clock.replays[-12:] == list("abc" + "bca" + "cab" + "abc")


def test_variants_that_settle_run_by_themselves() -> None:
    clock = FakeClock({"a": 4.0, "b": 10.0})
    timings = measure([clock.variant(n) for n in "ab"], clock, rounds=5, target_us=20, settle_us=100)
    assert {name: t.median_us for name, t in timings.items()} == {"a": 4.0, "b": 10.0}
    assert [t.samples for t in timings.values()] == [5, 5]
    assert "".join(clock.replays[-20:]) == 10 * "a" + 10 * "b"  # 100 us of graphs of 20, and five samples


def test_long_calls_are_made_once_a_sample() -> None:
    clock = FakeClock({"a": 4.0})
    call = Variant("a", clock.variant("a").call, graph=False)
    assert measure([call], clock, rounds=3, target_us=0) == {"a": Timing(4.0, 4.0, 4.0, 3, "eager")}
    assert len(clock.done) == 1 + 3  # the warm-up, and a call for each sample


def test_wall_clock_times_whole_calls() -> None:
    """And keeps the time of warm-ups apart, in which first calls build what they need."""
    waits = iter([0.05, 0.001, 0.002, 0.003])
    clock = WallClock(torch.device("cpu"))
    sleeping = Variant("a", lambda _: time.sleep(next(waits)), graph=False)
    timing = measure([sleeping], clock, rounds=3, target_us=0)["a"]
    assert clock.warm_up_s >= 0.05
    assert timing.median_us >= 2000
    assert (timing.samples, timing.mode) == (3, "eager")


def test_drift_meets_all_variants_alike() -> None:
    clock = FakeClock({"a": 5.0, "b": 5.0}, drift=0.01)
    a, b = measure([clock.variant("a"), clock.variant("b")], clock, rounds=20).values()
    assert a.p80_us - a.p20_us > 1.0
    # One after the other, the medians would differ by 20 steps of 0.05 µs; taking turns, by about one.
    assert a.median_us == pytest.approx(b.median_us, abs=0.1)


def test_uncapturable_variant_is_timed_eagerly() -> None:
    said: list[str] = []
    clock = FakeClock({"a": 4.0, "b": 10.0}, refuses="b")
    timings = measure([clock.variant("a"), clock.variant("b")], clock, rounds=3, report=said.append)
    assert [t.mode for t in timings.values()] == ["graph", "eager"]
    assert timings["b"].median_us == 10.0
    assert said == ["b: timed without a CUDA graph: operation not permitted when stream is capturing"]


def test_variant_may_ask_not_to_be_captured() -> None:
    clock = FakeClock({"a": 4.0}, refuses="a")
    eager = Variant("a", clock.variant("a").call, graph=False)
    assert measure([eager], clock, rounds=3, report=pytest.fail)["a"].mode == "eager"


@pytest.mark.parametrize(("late_after", "samples"), [(0, 3), (6, 6), (99, 9)])
def test_deadline_cuts_rounds_to_the_minimum(late_after: int, samples: int) -> None:
    clock = FakeClock({"a": 1.0})
    ticks = iter(range(3, 99))
    timing = measure(
        [clock.variant("a")], clock, rounds=9, min_rounds=3, deadline=late_after - 0.5, now=lambda: next(ticks)
    )
    assert timing["a"].samples == samples


@pytest.mark.parametrize(
    ("estimate", "copies", "calls"),
    [(5.0, 1, 400), (20.0, 1, 100), (1e6, 1, 1), (1e6, 7, 7), (20.0, 30, 90), (0.0, 157, 471)],
)
def test_calls_per_graph(estimate: float, copies: int, calls: int) -> None:
    assert plan_calls(estimate, copies) == calls


def test_rotation_exceeds_the_budget_and_is_bounded() -> None:
    assert rotation(1280 * 1280) * 1280 * 1280 >= ROTATE_BYTES
    assert rotation(1 << 40) == 1
    assert rotation(0) == MAX_COPIES


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
