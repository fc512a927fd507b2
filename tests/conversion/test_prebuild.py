"""Kernels that are built before layers are made: none for GPUs that qcut's kernels refuse."""

from __future__ import annotations

import pytest
import torch

import qcut
from qcut.backends.cuda.launch import prebuild
from qcut.conversion.prebuild import prebuild_layer, prebuild_layers
from qcut.conversion.tasks import Task
from qcut.errors import ConfigError
from qcut.ops import paths
from qcut.schemes import parse_scheme


def test_gpu_on_triton_path_is_left_out(monkeypatch):
    built = []
    monkeypatch.setattr(prebuild, "prebuild", lambda calls, device, progress: built.append(device))
    monkeypatch.setattr(paths, "_refusals", {1: "GPU Thor has compute capability 11.0"})
    tasks = {"layer": Task(torch.nn.Linear(64, 32).half(), parse_scheme("w8a8"))}
    for device in range(3):
        prebuild_layers(tasks, torch.device("cuda", device), [1, 64], progress=False)
    assert built == [0, 2]


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4", "codebook4_int8"])
def test_a_layer_on_a_gpu_is_built_for(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, built = qcut.Linear.from_float(torch.nn.Linear(128, 64).half(), scheme), []
    monkeypatch.setattr(prebuild, "prebuild", lambda calls, device: built.append((calls, device)))
    prebuild_layer(layer, torch.float16, [1, 300])
    assert not built

    class OnGpu:
        device = torch.device("cuda", 1)

    monkeypatch.setattr(layer, "buffers", lambda: iter([OnGpu()]))
    prebuild_layer(layer, torch.float16, [1, 300])
    ((calls, device),) = built
    sizes = {"n": 64, "k": 128, "bias": True, "activation": "none"}
    expected = [layer.cuda_calls(layer.scheme, dtype=torch.float16, rows=rows, **sizes) for rows in (1, 300)]
    assert set(calls) == {call for found in expected for call in found}
    assert device == 1


def test_float32_weights_of_16_bit_products_are_refused(monkeypatch):
    monkeypatch.setattr(paths, "_refusals", {0: "GPU Thor has compute capability 11.0"})
    tasks = {"layer": Task(torch.nn.Linear(64, 32), parse_scheme("codebook4"))}
    with pytest.raises(ConfigError, match="its weight is float32"):
        prebuild_layers(tasks, torch.device("cuda", 0), [1], progress=False)
