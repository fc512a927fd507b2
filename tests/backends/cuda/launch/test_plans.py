"""`qcut.backends.cuda.launch.plans`: the cache of plans, and launches as data."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from qcut.backends.cuda.launch import plans
from qcut.backends.cuda.launch.plans import LaunchSpec, PlanCache
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.quantize import QuantizePerTensor, QuantizePerToken
from qcut.emitters.families import INT8_MMA
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import LaunchError


def test_a_plan_is_made_once_whoever_asks_first() -> None:
    cache: PlanCache[object] = PlanCache()
    made: list[object] = []
    start = threading.Barrier(8)

    def make() -> object:
        made.append(object())
        return made[-1]

    def ask() -> None:
        start.wait()
        assert (cache.get("key") or cache.make("key", make)) is cache.get("key")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache.get("key")] == made


def test_a_plan_may_be_made_of_another_familys() -> None:
    inner: PlanCache[str] = PlanCache()
    outer: PlanCache[tuple[str, ...]] = PlanCache()
    assert outer.make(1, lambda: (inner.make(2, lambda: "inner"),)) == ("inner",)
    assert (inner.get(2), outer.get(1)) == ("inner", ("inner",))


def test_plan_that_cannot_be_made_is_tried_again() -> None:
    cache: PlanCache[str] = PlanCache()
    for _ in range(2):
        try:
            cache.make(1, lambda: str(1 / 0))
        except ZeroDivisionError:
            assert len(cache) == 0
    assert cache.make(1, lambda: "plan") == "plan"


def test_a_full_cache_is_emptied() -> None:
    cleared: list[int] = []
    cache: PlanCache[int] = PlanCache(limit=3, on_clear=lambda: cleared.append(len(cache)))
    get = cache.get
    for i in range(1, 8):
        cache.make(i, lambda i=i: i)
        assert len(cache) <= 3
    assert [get(i) for i in range(1, 8)] == [None] * 6 + [7]
    assert cleared == [0, 0]
    cache.clear()
    assert (get(7), len(cleared)) == (None, 3)


def test_grid_repeats_that_of_one_row() -> None:
    for desc, k in (
        (QuantizePerToken(DType.F16, "sm_80", threads=32), 64),
        (QuantizePerTensor(DType.F32, "sm_80"), 9000),
    ):
        grid = Grid(desc.rows, desc.grid(1, k))
        assert [grid(m) for m in range(1, 300)] == [desc.grid(m, k) for m in range(1, 300)]
    for tile in INT8_MMA.default_tiles(GemmProblem(), "sm_80"):
        grid = Grid(tile.threadblock_shape[0], INT8_MMA.grid(tile, 1000)(1))
        assert [grid(m) for m in range(1, 300)] == [INT8_MMA.grid(tile, 1000)(m) for m in range(1, 300)]


def test_kernel_that_never_waits_cannot_launch_early() -> None:
    source = KernelSource("hasty", "", "hasty", (), "sm_90a")
    LaunchSpec(source, Grid(1, (1, 1, 1)))
    with pytest.raises(LaunchError, match="kernel hasty: never waits"):
        LaunchSpec(source, Grid(1, (1, 1, 1)), pdl=True)
    LaunchSpec(replace(source, waits=True), Grid(1, (1, 1, 1)), pdl=True)


def test_forgetting_empties_caches_that_are_alive() -> None:
    cleared: list[str] = []
    first, second = PlanCache[int](on_clear=lambda: cleared.append("first")), PlanCache[int]()
    first.make("key", lambda: 1)
    second.make("key", lambda: 1)
    plans.forget_plans()
    assert (len(first), len(second), cleared) == (0, 0, ["first"])
    before = len(plans._caches)
    del second
    assert len(plans._caches) == before - 1


def test_loads_are_noted_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans.jit, "build", lambda source: None)
    monkeypatch.setattr(plans.jit, "load", lambda binary, source, device: None)
    source = KernelSource("qcut_x", "", "x", (), "sm_90a")
    with plans.watched_loads() as outer:
        plans.load(source, 0)
        with plans.watched_loads() as inner:
            plans.load(replace(source, name="qcut_y"), 0)
    plans.load(source, 0)
    assert (outer, inner) == (["qcut_x", "qcut_y"], ["qcut_y"])
