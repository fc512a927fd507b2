"""Builds the kernels that the GPU tests share before the first of them runs."""

from __future__ import annotations

import pytest

from tests.gpu.support.problems import gpu_test_calls


@pytest.fixture(scope="session")
def prebuilt() -> None:
    """All CUTLASS kernels of `gpu_test_calls`, in parallel: one at a time they take half a minute each."""
    from benchmarks.kernels import prebuild

    prebuild(gpu_test_calls())
