"""The turboquant-model package's sample on CUDA: float32 layer by layer, and the kernels in 16 bits."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qcut
from tests.gpu.support.oracles import DEVICE
from tests.support import ROOT

SAMPLE = ROOT.parent / "shared" / "data" / "turboquant-qr-4bit"
pytestmark = pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"no sample beside the project ({SAMPLE.name})")


def error(model: torch.nn.Module) -> float:
    expected = load_file(SAMPLE / "expected.safetensors")
    with torch.no_grad():
        logits: Tensor = model(expected["input_ids"].to(DEVICE)).logits
    return float((logits.float().cpu() - expected["logits"]).norm() / expected["logits"].norm())


def test_logits_of_the_explicit_path() -> None:
    with qcut.execution_path("explicit"):
        assert error(qcut.load(SAMPLE, device=DEVICE, progress=False)) < 1e-4


def test_logits_of_the_kernels() -> None:
    assert error(qcut.load(SAMPLE, device=DEVICE, dtype=torch.float16, progress=False)) < 5e-3
