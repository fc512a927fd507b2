"""The turboquant-model package's directories on CUDA: float32 layer by layer, and the kernels in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qcut
from tests.gpu.support.oracles import DEVICE
from tests.support import turboquant_oracle


@pytest.fixture(scope="module", params=turboquant_oracle.SAMPLES)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turboquant_oracle.sample(request.param, tmp_path_factory.mktemp("turboquant"))


def error(sample: Path, model: torch.nn.Module) -> float:
    expected = load_file(sample / "expected.safetensors")
    with torch.no_grad():
        logits: Tensor = model(expected["input_ids"].to(DEVICE)).logits
    return float((logits.float().cpu() - expected["logits"]).norm() / expected["logits"].norm())


def test_logits_of_the_explicit_path(sample: Path) -> None:
    with qcut.execution_path("reference"):
        assert error(sample, qcut.load(sample, device=DEVICE, progress=False)) < 1e-4


def test_logits_of_the_kernels(sample: Path) -> None:
    assert error(sample, qcut.load(sample, device=DEVICE, dtype=torch.float16, progress=False)) < 5e-3
