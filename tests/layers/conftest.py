"""Layers of codebooks as CUDA computes them, without a GPU."""

from __future__ import annotations

import pytest

from qcut.layers import rotations as shared_rotations


@pytest.fixture
def kernels(monkeypatch):
    """The path of CUDA on the CPU: the operators' CPU implementations behind it."""
    monkeypatch.setattr(shared_rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(shared_rotations, "stream_state", lambda device: (0, 0))
    monkeypatch.setattr(shared_rotations.shared, "_last", None)
