"""Kernels that serve while nvcc builds better ones: the same bits, in Python, in C++ and under a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import qcut
from qcut import jit
from qcut.backends.cuda.gemm import Product, chosen_spec, gemm_problem
from qcut.backends.cuda.gemm import gemm_s8 as gemm_on_cuda
from qcut.backends.cuda.launch import native, plans
from qcut.backends.cuda.linear import LinearLayer
from qcut.dispatch import gemm as dispatch
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import KernelSource
from qcut.emitters.families import INT8_CUTLASS, INT8_MMA
from qcut.emitters.gemm.problem import GemmProblem
from qcut.jit import waiting
from qcut.ops.gemm import GemmS8Op
from tests.gpu.layers.test_linear import layer, tokens
from tests.gpu.support.oracles import DEVICE, Gemm, assert_same, name
from tests.gpu.support.problems import EPILOGUE_SHAPE, GEMM_EPILOGUES

SHAPES = ((17, 336, 272), EPILOGUE_SHAPE, (520, 1280, 1280))
K, N, M = 272, 336, 129
"""Of a layer that CUTLASS serves."""


def sources() -> list[KernelSource]:
    """The kernels that these tests launch."""
    gpu = plans.target(torch.cuda.current_device())
    specs = []
    for problem in (GemmProblem(epilogue=epilogue) for epilogue in GEMM_EPILOGUES):
        specs.append(Product(problem, plans.m_bucket(M), N, K).spec(gpu, cutlass=True))
        specs += [Product(problem, plans.m_bucket(m), n, k).fallback(gpu) for m, n, k in SHAPES]
    for scheme in ("w8a8", "w8a8_static"):
        specs += LinearLayer(scheme, torch.float16, plans.m_bucket(M), N, K, True, "none", True).launches(0)
    return [spec.source for spec in specs]


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """Builds the kernels, in parallel."""
    jit.require(sources())


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Callers go on while nvcc works, and find none of its kernels; the process in the background finds them."""
    plans.forget_plans()
    monkeypatch.setenv(waiting.VARIABLE, "background")
    for module in (jit, waiting):
        monkeypatch.setattr(module, "find", lambda source: None)
    yield
    plans.forget_plans()


@pytest.mark.parametrize("epilogue", GEMM_EPILOGUES, ids=name)
def test_fallbacks_compute_the_same_bits(epilogue: Epilogue) -> None:
    gpu = plans.target(torch.cuda.current_device())
    compared = 0
    for m, n, k in SHAPES:
        given = Gemm.random(epilogue, m, n, k)
        arguments = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in given.args.items()}
        call = GemmS8Op(given.a.to(DEVICE), given.b.to(DEVICE), **arguments)
        problem = gemm_problem(call.a, call.b, epilogue, "row")
        rows = plans.m_bucket(m)
        final = dispatch.select_gemm(problem, plans.m_bucket(M), N, K, gpu)  # one for all shapes
        if final.family != INT8_CUTLASS.name:
            continue  # nobody waits for the others
        fallback = Product(problem, rows, n, k).fallback_choice(gpu)
        assert fallback.family == INT8_MMA.name
        assert chosen_spec(fallback, problem, n, gpu).source.toolchain == "nvrtc"
        assert_same(gemm_on_cuda(call, fallback), gemm_on_cuda(call, final))
        compared += 1
    assert compared or epilogue.row_scale == epilogue.col_scale == "none"


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static"])
def test_a_better_kernel_takes_over(scheme: str, nothing_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = layer(scheme, K, N).to(DEVICE)
    x = tokens(M, K, torch.float16).to(DEVICE)
    before = plans.generation()
    with plans.watched_loads() as first:
        provisional = linear(x)
    graph = torch.cuda.CUDAGraph()
    with plans.recapturing(), torch.cuda.graph(graph):
        captured = linear(x)
    monkeypatch.undo()  # as after the build
    assert qcut.wait_for_kernels(120)
    assert plans.generation() > before
    with plans.watched_loads() as second:
        final = linear(x)
    assert [loaded for loaded in first if "mma" in loaded]
    assert [loaded for loaded in second if "cutlass" in loaded]
    graph.replay()
    for y in (final, captured):
        assert_same(y, provisional)


def test_a_better_kernel_of_e4m3_tokens_takes_over(nothing_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8_cutlass exists only on sm_90a")
    linear = layer("fp8_dynamic", K, N).to(DEVICE)
    x = tokens(M, K, torch.float16).to(DEVICE)
    with plans.watched_loads() as first:
        provisional = linear(x)
    monkeypatch.undo()  # as after the build
    assert qcut.wait_for_kernels(240)
    with plans.watched_loads() as second:
        final = linear(x)
    assert [loaded for loaded in first if "fp8_mma" in loaded]
    assert [loaded for loaded in second if "fp8_cutlass" in loaded]
    assert float((final - provisional).double().norm()) < 2.0**-6 * float(provisional.double().norm())


def test_graph_captured_early_keeps_no_fallback(
    nothing_built: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linear = layer("w8a8", K, N).to(DEVICE)
    x = tokens(M, K, torch.float16).to(DEVICE)
    provisional = linear(x)
    graph = torch.cuda.CUDAGraph()
    with plans.watched_loads() as loads, torch.cuda.graph(graph):
        captured = linear(x)
    assert [loaded for loaded in loads if "cutlass" in loaded]
    assert "waiting for nvcc to build" in caplog.text
    graph.replay()
    assert_same(captured, provisional)
    monkeypatch.undo()
    assert qcut.wait_for_kernels(120)


def test_cpp_calls_leave_the_fallback(nothing_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.library()
    assert library is not None
    linear = layer("w8a8", K, N).to(DEVICE)
    x = tokens(M, K, torch.float16).to(DEVICE)
    provisional = [linear(x) for _ in range(3)]
    monkeypatch.undo()
    assert qcut.wait_for_kernels(120)
    hits = library.hits
    with plans.watched_loads() as loads:
        final = linear(x)  # C++ has no plan any more
    assert library.hits == hits
    assert [loaded for loaded in loads if "cutlass" in loaded]
    assert_same(linear(x), final)
    assert library.hits == hits + 1
    for y in provisional:
        assert_same(y, final)
