"""Builds the kernels that the GPU tests share before the first test that needs them runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.support.problems import gpu_test_calls
from tests.support import ROOT


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several workers, CUTLASS kernels are built in the background while other tests run.

    A CUTLASS kernel takes a core half a minute. A worker that needs one earlier waits for its lock in the cache; one
    that did not compile fails in the test that needs it.
    """
    config = session.config
    is_worker = hasattr(config, "workerinput")
    if not is_worker and config.getoption("numprocesses", None) and torch.cuda.is_available():
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.support.prebuild"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


BUILD_THEIR_OWN = {
    "test_engine",
    "test_prompts",
    "test_stacked_engine",
    "test_stacking",
    "test_search",
    "test_gemm",
    "test_models",
}
"""Files with tests that wait for CUTLASS kernels of their own."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that build CUTLASS kernels run first, so that none is waited for at the end; those on shared ones last."""

    def turn(item: pytest.Item) -> int:
        if "prebuilt" in getattr(item, "fixturenames", ()) or "cutlass" in item.path.stem:
            return 2
        return 0 if item.path.stem in BUILD_THEIR_OWN else 1

    items.sort(key=turn)


@pytest.fixture(scope="session")
def prebuilt() -> None:
    """All CUTLASS kernels of `gpu_test_calls`, in parallel: one at a time they take half a minute each."""
    from benchmarks.layers.device_kernels import prebuild

    prebuild(gpu_test_calls())
