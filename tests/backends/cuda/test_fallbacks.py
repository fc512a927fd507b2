"""Fallback kernels: which they are, and how calls leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda.codebook import gemm_spec
from qcut.backends.cuda.gemm import FALLBACK_ROWS, Product, fp8_spec, w8a16_spec
from qcut.backends.cuda.launch import native, plans
from qcut.backends.cuda.launch.plans import LaunchSpec, PlanCache
from qcut.backends.cuda.launch.prebuild import prebuild
from qcut.backends.cuda.linear import LinearLayer, linear_problem
from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch.gpus import Target
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.errors import BuildError
from qcut.jit import background, waiting
from qcut.jit.background import Job
from tests.support.fakes.launches import A100, H200

SLOW = KernelSource("slow", "", "slow", (), "sm_90a", toolchain="nvcc")
QUICK = KernelSource("quick", "", "quick", (), "sm_90a")


@dataclass
class Loaded:
    """A kernel on a device."""

    name: str
    host_launcher: int = 0


@dataclass
class Compilers:
    """What has been built, and what is to be built in the background."""

    built: set[str] = field(default_factory=set)
    now: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    fails: bool = False

    def find(self, source: KernelSource) -> Any:
        return source if source.name in self.built else None

    def build(self, source: KernelSource) -> Any:
        self.now.append(source.name)
        return source

    def build_many(self, sources: Iterable[KernelSource], progress: bool) -> dict[str, Any]:
        return {
            source.name: BuildError("nvcc fails") if source.name in self.broken else self.build(source)
            for source in sources
        }

    def later(self, job: Job, *, first: bool = False) -> bool:
        self.jobs.append(job)
        if first:
            self.awaited.append(job.key)
        return not self.fails


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    found = Compilers()
    monkeypatch.setenv("QCUT_BUILD", "background")
    for module in (plans.jit, waiting):
        monkeypatch.setattr(module, "find", found.find)
    monkeypatch.setattr(plans.jit, "build", found.build)
    monkeypatch.setattr(plans.jit, "load", lambda binary, source, device: Loaded(source.name))
    monkeypatch.setattr(waiting, "build_many", found.build_many)
    monkeypatch.setattr(background.builder, "later", found.later)
    monkeypatch.setattr(
        background, "kernel_job", lambda source: Job(f"key of {source.name}", source.name, found.build, (source,), id)
    )
    yield found
    plans.forget_plans()


@pytest.fixture
def spec() -> LaunchSpec:
    grid = Grid(1, (1, 1, 1))
    return LaunchSpec(SLOW, grid, (132,), row_multiple=64, fallback=lambda: LaunchSpec(QUICK, grid))


# ── which kernels ────────────────────────────────────────────────────────────────────────────────


def fallback_of(spec: LaunchSpec) -> LaunchSpec | None:
    """The fallback of a kernel that nvcc builds: one that NVRTC builds, without a fallback; None for other kernels."""
    if spec.source.toolchain != "nvcc":
        assert spec.fallback is None
        return None
    assert spec.fallback is not None
    quick = spec.fallback()
    assert (quick.source.toolchain, quick.source.host_text, quick.fallback) == ("nvrtc", None, None)
    return quick


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static"])
def test_three_fallbacks_serve_any_number_of_rows(scheme: str, gpu: Target) -> None:
    problem = linear_problem(DType.F16, 5120, 1280, True, "gelu_tanh", scheme)
    names, waited = set(), 0
    for rows in sorted({plans.m_bucket(m) for m in range(9, 10_000, 7)}):
        spec = Product(problem, rows, 5120, 1280).spec(gpu, cutlass=True)
        if (quick := fallback_of(spec)) is None:
            continue
        assert isinstance(quick.grid, Grid)  # so that C++ can launch it
        names.add(quick.source.name)
        waited += 1
    assert waited > len(FALLBACK_ROWS) >= len(names)


def test_w8a16_has_fallbacks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcut.backends.cuda.gemm.has_cutlass", lambda: True)
    problem, names, waited = linear_problem(DType.F16, 5120, 1280, True, "none", "w8a16"), set(), set()
    for rows in sorted({plans.m_bucket(m) for m in range(1, 10_000, 7)}):
        spec = w8a16_spec(problem, rows, 5120, 1280, H200)
        if (quick := fallback_of(spec)) is None:
            continue
        names.add(quick.source.name)
        waited.add(spec.source.name)
    assert len(waited) > len(FALLBACK_ROWS) >= len(names)


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "fp8_static"])
def test_fallbacks_of_fp8_take_the_same_tokens(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcut.backends.cuda.gemm.has_cutlass", lambda: True)
    problem, names, waited = linear_problem(DType.BF16, 5120, 1280, True, "none", scheme), set(), set()
    for rows in sorted({plans.m_bucket(m) for m in range(1, 10_000, 7)}):
        tokens, spec = fp8_spec(problem, rows, 5120, 1280, H200)
        assert f"_{tokens.value}xe4m3_" in spec.source.name
        if (quick := fallback_of(spec)) is None:
            continue
        assert quick.source.params == spec.source.params[: len(quick.source.params)]
        assert f"_{tokens.value}xe4m3_" in quick.source.name
        names.add(quick.source.name)
        waited.add(spec.source.name)
    assert len(waited) >= len(names) > 0
    assert len(names) <= len(FALLBACK_ROWS)


def test_codebook_of_one_norm_a_row_has_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcut.backends.cuda.codebook.has_cutlass", lambda: True)
    problem = codebook_dispatch.problem_of(DType.S8, 4, 1, DType.F16, True, "none", False, 16, row_norm=True)
    spec = gemm_spec(problem, 4096, 4096, 32, H200)
    assert (spec.source.toolchain, spec.fallback is None) == ("nvcc", False)
    quick = spec.fallback()
    assert quick.source.name.startswith("qcut_codebook_wgmma")
    assert (quick.source.toolchain, quick.fallback, quick.pdl) == ("nvrtc", None, spec.pdl)


# ── how calls leave them ─────────────────────────────────────────────────────────────────────────


def test_fallback_serves_until_kernel_is_built(compilers: Compilers, spec: LaunchSpec) -> None:
    cache: PlanCache[plans.LaunchPlan] = PlanCache()

    def plan() -> plans.LaunchPlan:
        return cache.get("key") or cache.make("key", lambda: spec.load(0))

    assert (plan().name, plan().row_multiple, compilers.now) == ("quick", 1, ["quick"])
    (job,) = compilers.jobs
    assert (job.key, job.name) == ("key of slow", "slow")
    assert compilers.awaited == [job.key]
    assert (plan().name, len(compilers.jobs)) == ("quick", 1)
    compilers.built.add("slow")
    assert plans.forget_plans in background.builder._listeners
    plans.forget_plans()
    assert (plan().name, plan().row_multiple) == ("slow", 64)


def test_failed_build_keeps_fallback(compilers: Compilers, spec: LaunchSpec) -> None:
    compilers.fails = True
    plan = spec.load(0)
    assert (plan.name, plan.is_fallback) == ("quick", False)


def test_who_waits_gets_the_kernel(compilers: Compilers, spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting.no_fallbacks():
        assert spec.load(0).name == "slow"
    monkeypatch.setenv("QCUT_BUILD", "wait")
    assert spec.load(0).name == "slow"
    monkeypatch.delenv("QCUT_BUILD")
    assert replace(spec, fallback=None).load(0).name == "slow"  # nothing has the same results
    assert (compilers.now, compilers.jobs) == (["slow"] * 3, [])


def test_capture_waits_for_the_best_kernel(
    compilers: Compilers, spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared: PlanCache[plans.LaunchPlan] = PlanCache()
    called: PlanCache[plans.LaunchPlan] = PlanCache()
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))

    def plan() -> plans.LaunchPlan:
        return called.get("call") or called.make(
            "call", lambda: shared.get("layer") or shared.make("layer", lambda: spec.load(0))
        )

    assert [plan().name for _ in range(3)] == ["quick"] * 3
    assert compilers.now == ["quick"]  # a fallback is made once, and found by those that may use one
    assert called.get("call") is None
    assert plan().for_native() is None
    capturing.append(True)
    with plans.recapturing():
        assert plan().name == "quick"
    monkeypatch.setenv("QCUT_BUILD", "fallback")
    assert plan().name == "quick"
    monkeypatch.setenv("QCUT_BUILD", "background")
    assert not caplog.messages
    assert [plan().name for _ in range(2)] == ["slow"] * 2
    assert compilers.now == ["quick", "slow", "slow"]  # built, then loaded
    (line,) = caplog.messages
    assert "waiting for nvcc to build slow" in line
    capturing.clear()
    assert plan().name == called.get("call").name == "slow"


def test_capture_takes_fallback_where_build_fails(
    compilers: Compilers, spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.broken.add("slow")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cache: PlanCache[plans.LaunchPlan] = PlanCache()
    assert cache.make("key", lambda: spec.load(0)).name == "quick"
    assert cache.get("key") is None
    compilers.fails = True  # as the background has reported
    assert cache.make("key", lambda: spec.load(0)).name == "quick"
    assert cache.get("key") is not None


def test_forgetting_plans_is_counted() -> None:
    before = plans.generation()
    plans.forget_plans()
    assert plans.generation() == before + 1


def test_cpp_comes_later_too(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[int] = []
    native.build.cache_clear()

    def activate() -> Any:
        activated.append(1)
        return "library"

    state: dict[str, Any] = {"_library": None, "_settled": False, "_kept": None, "_activate": activate}
    state |= {"problem": lambda: None, "_stored": lambda digest: None, "fingerprint": lambda: "digest"}
    for name, value in state.items():
        monkeypatch.setattr(native, name, value)
    assert native.library(wait=False) is None
    assert native.library(wait=False) is None
    assert (compilers.awaited, activated) == (["digest"] * 2, [])
    compilers.jobs[0].keep(b"code")
    assert native.library(wait=False) == native.library(wait=False) == native.library() == "library"
    assert len(compilers.jobs) == 2
    assert native.build() == b"code"

    monkeypatch.setattr(native, "_kept", None)
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_settled", False)
    native.build.cache_clear()
    compilers.fails = True
    assert native.library(wait=False) is None
    assert native.library() is None
    assert activated == [1]


# ── ahead of calls ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[LinearLayer]]:
    for module in (linear_cuda, gemm_cuda, plans):
        monkeypatch.setattr(module, "target", lambda device: H200)
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: True)
    monkeypatch.setattr(native, "problem", lambda: "no g++")
    monkeypatch.setattr(native, "build", lambda: None)
    return lambda: [LinearLayer("w8a8", torch.float16, rows, 1280, 1280, True, "none", True) for rows in (1, 64, 4096)]


def test_prebuild_has_what_calls_launch_first(compilers: Compilers, layers: Callable[[], list[LinearLayer]]) -> None:
    prebuild(layers(), 0, progress=False)
    launches = [spec for layer in layers() for spec in layer.launches(0)]
    slow = {spec.source.name for spec in launches if spec.source.toolchain == "nvcc"}
    assert slow == {job.name for job in compilers.jobs}
    assert len(slow) == 2
    compilers.jobs.clear()
    ahead = set(compilers.now)
    assert not ahead & slow
    for spec in launches:
        spec.load(0)
    assert set(compilers.now) == ahead
    assert {job.name for job in compilers.jobs} == slow


def test_prebuild_waits_where_callers_do(
    compilers: Compilers, layers: Callable[[], list[LinearLayer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QCUT_BUILD", "wait")
    prebuild(layers(), 0, progress=False)
    assert set(compilers.now) == {spec.source.name for layer in layers() for spec in layer.launches(0)}
    assert compilers.jobs == []
