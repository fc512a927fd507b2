"""Shared fixtures: seeded data that reaches the extremes, and the GPU marker."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch: its threads spin between small operations, and two of them on two busy cores cost minutes.
# The processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The compiler of torch.compile starts a process for each core, in each of the tests' own processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tests state which kernel runs; none of them needs the one that serves while a better one is built.
os.environ.setdefault("QCUT_BUILD", "wait")

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: its interpreter then runs the Triton kernels on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support import llama2c_oracle

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_report_header() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device: tests/gpu and tests marked gpu are deselected"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs a GPU only where there is none: a missing build must fail. All files are imported."""
    needing = [item for item in items if GPU_TESTS in item.path.parents or item.get_closest_marker("gpu")]
    for item in needing:
        item.add_marker("gpu")
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=needing)
        left_out = set(needing)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """What is there before a module's tests stays out of garbage collection: a million objects take it a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gpu() -> torch.device:
    """The current CUDA device; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    return torch.device("cuda", torch.cuda.current_device())


Int8Maker = Callable[..., torch.Tensor]


def _int8(rows: int, columns: int, kind: str = "random", low: int = -128) -> torch.Tensor:
    """int8 ``[rows, columns]`` over the full range, its extremes, or a sign checkerboard."""
    if kind == "random":
        return torch.randint(low, 128, (rows, columns), dtype=torch.int8)
    if kind in ("min", "max"):
        return torch.full((rows, columns), low if kind == "min" else 127, dtype=torch.int8)
    parity = (torch.arange(rows)[:, None] + torch.arange(columns)) % 2
    return torch.where(parity == 0, 127, low).to(torch.int8)


@pytest.fixture
def int8() -> Int8Maker:
    """Maker of int8 matrices: ``int8(rows, columns, kind, low)``, kind random, min, max or checkerboard."""
    return _int8


@pytest.fixture(scope="session", params=llama2c_oracle.SAMPLES)
def llama2c_sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> llama2c_oracle.Sample:
    """Files of llama2.c: generated ones, and its own where they lie next to the project."""
    return llama2c_oracle.sample(request.param, tmp_path_factory.mktemp("llama2c"))
