"""Kernels run in Triton's interpreter, on CPU tensors; on a machine with a GPU tests/gpu/portable runs them there."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter():
    """Skips where Triton's interpreter is not to be had."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu/portable runs the kernels on it")
