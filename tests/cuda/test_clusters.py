"""Attention's cluster form is tried before it is used: what follows from a probe that works, fails, or cannot run."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qcut.cuda import attention as attention_cuda
from qcut.cuda import clusters
from qcut.cuda.clusters import Outcome, are_usable
from qcut.dispatch.gpus import Target
from qcut.errors import ToolchainError
from qcut.ops.attention import DecodeAttention
from tests.support.launches import H200, Launches, note_launches

B200 = Target("sm_100", 148, "NVIDIA B200")
WORKS, FAILS = Outcome(True, "it exchanged"), Outcome(False, "it waited in vain")


class Probe:
    """Stands in for the kernel, and counts its launches."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.asked: list[tuple[int, int]] = []

    def __call__(self, device: int, cluster: int, arch: str) -> Outcome:
        assert arch == B200.arch
        self.asked.append((device, cluster))
        return self.outcome


@pytest.fixture
def probing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Outcome], Probe]:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(clusters, "driver_version", lambda: "13.0")
    monkeypatch.setattr(clusters, "build", lambda source: SimpleNamespace(key="of the kernel"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def install(outcome: Outcome) -> Probe:
        """As in a new process."""
        probe = Probe(outcome)
        monkeypatch.setattr(clusters, "_outcomes", {})
        monkeypatch.setattr(clusters, "probe", probe)
        return probe

    return install


Probing = Callable[[Outcome], Probe]


def test_where_clusters_were_measured_nothing_is_tried(probing: Probing) -> None:
    probe = probing(FAILS)
    assert are_usable(H200, 0, 8)
    assert probe.asked == []


def test_a_success_is_remembered_by_the_process_and_by_the_next(probing: Probing) -> None:
    probe = probing(WORKS)
    assert [are_usable(B200, 0, size) for size in (8, 8, 4, 8)] == [True] * 4
    assert are_usable(B200, 1, 8)  # another device of the same kind takes the cache's word
    assert probe.asked == [(0, 8), (0, 4)]
    again = probing(FAILS)
    assert are_usable(B200, 0, 8)
    assert again.asked == []


@pytest.mark.parametrize("changed", ["driver", "kernel", "gpu"])
def test_another_driver_kernel_or_gpu_is_tried_anew(
    changed: str, probing: Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing(WORKS)
    assert are_usable(B200, 0, 8)
    if changed == "driver":
        monkeypatch.setattr(clusters, "driver_version", lambda: "13.1")
    elif changed == "kernel":
        monkeypatch.setattr(clusters, "build", lambda source: SimpleNamespace(key="of another kernel"))
    gpu = Target("sm_100", 148, "NVIDIA B300") if changed == "gpu" else B200
    probe = probing(FAILS)
    with pytest.warns(RuntimeWarning):
        assert not are_usable(gpu, 0, 8)
    assert probe.asked == [(0, 8)]


def test_a_failure_warns_once_and_the_next_process_tries_again(probing: Probing) -> None:
    probe = probing(FAILS)
    with pytest.warns(RuntimeWarning, match=r"NVIDIA B200, it waited in vain; attention does without clusters"):
        assert not are_usable(B200, 0, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not are_usable(B200, 0, 8)
    assert probe.asked == [(0, 8)]
    assert probing(WORKS).asked == []
    assert are_usable(B200, 0, 8)


def test_a_capture_is_no_time_to_try(probing: Probing, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probing(WORKS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not are_usable(B200, 0, 8)
    assert probe.asked == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert are_usable(B200, 0, 8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert are_usable(B200, 0, 8)


def test_without_a_compiler_there_are_no_clusters(probing: Probing, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probing(WORKS)

    def missing(source: object) -> str:
        raise ToolchainError("NVRTC is not installed")

    monkeypatch.setattr(clusters, "build", missing)
    with pytest.warns(RuntimeWarning, match="NVRTC is not installed"):
        assert not are_usable(B200, 0, 8)
    assert probe.asked == []


# ── the kernel's launch ──────────────────────────────────────────────────────────────────────────


class Event:
    """Of a kernel that ends, or does not."""

    ends = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.ends


class Stream:
    cuda_stream = 7


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lets `probe` run on the CPU's memory; what each CTA writes is taken from the list's first element."""
    writes: list[Any] = []

    class Kernel:
        def launch(self, grid: Any, args: Any, stream: int) -> None:
            outcomes, _, limit_ns, silent = args
            values = writes[0]
            (ctypes.c_int * len(values)).from_address(outcomes)[:] = values
            writes.append((grid, limit_ns, silent, stream))

    monkeypatch.setattr(clusters, "load", lambda source, device: Kernel())
    monkeypatch.setattr(clusters, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: warnings.catch_warnings())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    return writes


@pytest.mark.parametrize(
    ("written", "works", "says"),
    [
        ([1] * 4, True, "a cluster of 4 CTAs exchanged its parts"),
        ([0] * 4, False, "did not run"),
        ([1, 1, 0, 1], False, "did not run"),
        ([1, 1, 3, 1], False, "waited in vain"),
        ([2] * 4, False, "did not start as a whole"),
        ([1, 4, 1, 1], False, "wrong values"),
        ([1, 1, 1, 99], False, "reported 99"),
    ],
)
def test_one_cta_that_fails_is_a_failure(launched: list[Any], written: list[int], works: bool, says: str) -> None:
    launched.append(written)
    found = clusters.probe(0, 4, B200.arch)
    assert (found.works, says in found.text) == (works, True), found
    assert launched[1] == ((4, 1, 1), clusters.LIMIT_NS, -1, 7)


def test_a_kernel_that_does_not_end_is_given_up(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launched.append([1] * 4)
    monkeypatch.setattr(Event, "ends", False)
    assert clusters.probe(0, 4, B200.arch, limit_ns=1000) == Outcome(False, "the probe kernel did not end")


def test_a_device_error_is_a_failure(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal instruction was encountered\nmore")

    launched.append([1] * 4)
    monkeypatch.setattr(Event, "query", fails)
    assert clusters.probe(0, 4, B200.arch) == Outcome(False, "CUDA error: an illegal instruction was encountered")


# ── attention ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("works", [True, False])
def test_attention_falls_back_to_a_workspace(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usable(gpu: Target, device: int, cluster: int) -> bool:
        asked.append((gpu, cluster))
        return works

    launches: Launches = note_launches(attention_cuda, B200, monkeypatch)
    monkeypatch.setattr(clusters, "are_usable", usable)
    monkeypatch.setattr(attention_cuda, "_counters", attention_cuda.Counters(lambda device: 0, lambda: False))
    q, keys = torch.randn(1, 20, 64).half(), torch.zeros(1, 20, 1024, 64).half()
    positions = torch.zeros(1, dtype=torch.int32)
    attention_cuda.decode_attention(DecodeAttention(q, keys, keys, None, None, positions, 0.1))
    (launch,) = launches
    ((gpu, cluster),) = asked
    assert (gpu, cluster > 1) == (B200, True)
    assert launch["kernel"].endswith(f"_c{cluster}") == works
    assert (launch["workspace"] == 0) == works
    assert launch["grid"][0] > 1
