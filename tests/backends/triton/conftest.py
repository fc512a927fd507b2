"""Runs kernels in Triton's interpreter on CPU tensors; with a GPU, tests/gpu/backends/triton runs them there."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter():
    """Skips where Triton's interpreter is not to be had."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu/backends/triton runs the kernels on it")
