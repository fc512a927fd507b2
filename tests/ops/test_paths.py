"""Back ends: which GPUs have CUDA kernels, one warning for each that has not, threads, the C++ operators."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from qcut.errors import PathWarning
from qcut.ops import paths

H200, THOR, SPARK, T4 = ("NVIDIA H200", 9, 0), ("Thor", 11, 0), ("GB10", 12, 1), ("Tesla T4", 7, 5)


def give_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, int, int], hip: str | None = None) -> None:
    properties = [SimpleNamespace(name=n, major=a, minor=b, multi_processor_count=20) for n, a, b in gpus]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(paths, "_refusals", None)
    monkeypatch.setattr(paths, "_warned", set())


def test_gpus_that_cuda_kernels_refuse(monkeypatch):
    give_gpus(monkeypatch, H200, THOR, SPARK, T4)
    assert set(paths.refusals()) == {1, 3}
    assert "compute capability 11.0" in paths.refusals()[1]
    assert not paths.is_usual()
    give_gpus(monkeypatch, H200, SPARK)
    assert paths.is_usual()
    give_gpus(monkeypatch, ("MI300X", 9, 4), hip="7.0")
    assert paths.refusals() == {0: "GPU MI300X is AMD's; qcut's CUDA kernels run on NVIDIA's"}


def test_one_warning_for_each_gpu(monkeypatch):
    give_gpus(monkeypatch, H200, THOR, THOR)
    devices = [torch.device("cuda", i) for i in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [paths.path_on(device) for device in devices * 2] == ["cuda", "triton", "triton"] * 2
    assert [warning.category for warning in caught] == [PathWarning] * 2
    with warnings.catch_warnings(), paths.execution_path("reference"):
        warnings.simplefilter("error")
        assert {paths.path_on(device) for device in devices} == {"reference"}


def test_a_path_is_a_threads_own():
    with paths.execution_path("triton"), ThreadPoolExecutor(1) as pool:
        assert paths.path.name == "triton"
        assert pool.submit(lambda: paths.path.name).result() == "cuda"
    assert paths.path.name == "cuda"
