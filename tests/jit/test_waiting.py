"""Waiting for compilers: the setting, and dry runs, which collect missing kernels to build them together."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from qcut.backends.cuda.launch import plans
from qcut.backends.cuda.launch.plans import LaunchPlan, LaunchSpec, PlanCache
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.errors import BuildError, ConfigError
from qcut.jit import waiting
from qcut.jit.waiting import UnbuiltKernel, dry_run, dry_run_first


class Machine:
    """A compiler and a GPU that remember what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: set[str] = set()
        self.together: list[list[str]] = []
        self.launched: list[str] = []
        self.broken: set[str] = set()
        monkeypatch.setattr(waiting, "find", lambda source: source.name if source.name in self.built else None)
        monkeypatch.setattr(waiting, "build_many", self.build_many)
        monkeypatch.setattr(plans, "load", self.load)

    def build_many(self, sources: Any, progress: bool) -> dict[str, Any]:
        names = [source.name for source in sources]
        self.together.append(names)
        self.built |= set(names)
        return {name: BuildError(name) if name in self.broken else name for name in names}

    def load(self, source: KernelSource, device: int) -> Any:
        machine, self.built = self, self.built | {source.name}

        class Loaded:
            name, block, smem_bytes, function, host_launcher = source.name, 32, 0, 1, 0

            def launch(self, *given: object) -> None:
                machine.launched.append(source.name)

        return Loaded()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def spec(name: str) -> LaunchSpec:
    source = ArgmaxRows(DType.F16, "sm_90a", False).emit()
    return LaunchSpec(replace(source, name=name), lambda m: (m, 1, 1), tail=(132,))


def test_missing_kernels_are_built_together_and_then_launched(machine: Machine) -> None:
    inner: PlanCache[LaunchPlan] = PlanCache()
    outer: PlanCache[LaunchPlan] = PlanCache()
    machine.built = {"b"}

    def call(name: str) -> None:
        plan = outer.get(name) or outer.make(name, lambda: inner.make(name, lambda: spec(name).load(0)))
        plan.launch(1, (), 0)

    def run() -> int:
        for name in "abcab":
            call(name)
        return len(machine.launched)

    assert dry_run_first(run) == 2 + 5
    assert machine.together == [["a", "c"]]
    assert machine.launched == [*"bb", *"abcab"]
    assert (len(inner), len(outer)) == (3, 3)
    assert dry_run_first(run) == 7 + 5
    assert machine.together == [["a", "c"]]


def test_dry_run_keeps_no_plan_of_missing_kernels(machine: Machine) -> None:
    cache: PlanCache[LaunchPlan] = PlanCache()
    with dry_run() as missing:
        plan = cache.make("a", lambda: spec("a").load(0))
        assert plan.for_native() is None
        assert plan.workspace_bytes(()) == 0
        plan.launch(1, (), 0)
    assert list(missing) == ["a"]
    assert len(cache) == 0
    assert machine.launched == []
    assert not isinstance(cache.make("a", lambda: spec("a").load(0))._kernel, UnbuiltKernel)
    assert len(cache) == 1


def test_kernel_that_fails_to_compile_is_an_error(machine: Machine) -> None:
    machine.broken = {"a"}
    runs = []

    def run() -> None:
        runs.append(0)
        spec("b").load(0)
        spec("a").load(0)

    with pytest.raises(BuildError, match="a"):
        dry_run_first(run)
    assert len(runs) == 1
    with pytest.raises(ZeroDivisionError):
        dry_run_first(lambda: 1 // 0)
    spec("c").load(0).launch(1, (), 0)
    assert machine.launched == ["c"]  # no dry run goes on


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, mode in (("", "background"), ("background", "background"), ("wait", "wait"), ("fallback", "fallback")):
        monkeypatch.setenv("QCUT_BUILD", value)
        assert waiting.build_mode() == mode
        with waiting.no_fallbacks():
            assert waiting.build_mode() == "wait"
    monkeypatch.setattr(sys, "executable", "")  # an interpreter inside of another program
    assert waiting.build_mode() == "wait"
    monkeypatch.setenv("QCUT_BUILD", "soon")
    with pytest.raises(ConfigError, match="QCUT_BUILD is 'soon'; allowed: background, wait, fallback"):
        waiting.build_mode()
