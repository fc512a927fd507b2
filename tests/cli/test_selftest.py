"""``qcut doctor --selftest`` without a GPU: its checks on the CPU, what it calls a difference, what it reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcut.cli import selftest
from qcut.cli.main import main
from qcut.cli.selftest import CPU, Check, Near, Verdict, all_checks, difference, half_ulp, run_check, run_checks
from qcut.dispatch.gpus import GPUS, Target
from qcut.errors import BuildError, DeviceError
from tests.support.fakes.launches import H200

FAMILIES = {
    *("int8_mma", "int8_wmma", "int8_dp4a", "int8_cutlass", "int8_stream", "int16x8", "integers8", "integers16"),
    *("w8a16", "w8a16_mma", "w8a16_stream", "codebook", "rotate", "rotate_dense", "norm", "append_kv", "attention"),
    *("append_attention", "prompt_attention", "embed", "argmax", "advance", "accept", "quantize_per_token"),
    *("quantize_per_tensor", "quantize_rotated", "dequantize", "colsum", "silu_mul", "gelu_tanh"),
    *("route", "linear_route", "sort_routes", "sum_routes"),
}


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return all_checks()


def test_the_cpu_passes_its_own_test(checks: list[Check]) -> None:
    """So data, calls and bounds are consistent. A dense rotation's kernel reads 16-bit matrices, the CPU does not."""
    verdicts = run_checks([check for check in checks if check.family != "rotate_dense"], CPU, nvcc=True)
    assert [str(v) for v in verdicts if v.problem or v.skipped] == []


def test_every_family_has_a_check(checks: list[Check]) -> None:
    assert {check.family for check in checks} == FAMILIES
    assert len({(check.family, check.shape) for check in checks}) == len(checks)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_slow_families_exist_on_every_gpu(gpu: Target) -> None:
    names = [source.name for source in selftest.slow_sources(gpu, cutlass=True)]
    mixed = "w8a16_cutlass" if gpu.arch == "sm_90a" else "w8a16_mma"
    families = ("int8_mma", "int8_wmma", "int8_dp4a", "int8_cutlass", mixed)
    assert all(family in name for family, name in zip(families, names, strict=True))
    assert not any("cutlass" in source.name for source in selftest.slow_sources(gpu, cutlass=False))


# ── differences ──────────────────────────────────────────────────────────────────────────────────


def of_device(change: Callable[[Tensor], object]) -> Check:
    """A check that changes the device's result (first call) and keeps the CPU's (second call)."""
    calls: list[bool] = []

    def compute() -> Tensor:
        result = torch.arange(24, dtype=torch.int8).view(4, 6)
        if not calls:
            change(result)
        calls.append(True)
        return result

    return Check("int8_mma", "4x6x1", compute)


def test_one_wrong_bit_is_named_with_its_place() -> None:
    def flip(t: Tensor) -> None:
        t[2, 3] ^= 1
        t[3, 0] ^= 4

    verdict = run_check(of_device(flip), CPU)
    assert verdict.problem == "2 of 24 values differ, first at [2, 3]: 14, must be 15 (every bit)"
    assert "[FAIL] int8_mma" in str(verdict)
    assert run_check(of_device(lambda t: None), CPU).problem == ""


def test_every_wrong_result_is_found(checks: list[Check]) -> None:
    """One value of each result is off, by a bit or by more than its bound."""
    large = ("codebook", "rotate", "rotate_dense", "prompt_attention", "attention")  # of the same kinds as others
    for check in checks:
        if check.family in large:
            continue
        got = check.run(CPU)
        for result, expected in zip(got, check.expected(got), strict=True):
            wrong = result.clone()
            wrong.view(-1)[-1] += 4 * float(expected.within.max()) + 1 if isinstance(expected, Near) else 1
            assert difference(wrong, expected).startswith("1 of "), check.family


NAN, ONE = torch.nan, torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "first at [1]"),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), ""),
        (torch.tensor([NAN, 1.0]), torch.tensor([0.0, 1.0]), "first at [0]: nan"),
        (torch.zeros(2), torch.zeros(3), "torch.float32 [2], not torch.float32 [3]"),
        (torch.zeros(2), torch.zeros(2).half(), "not torch.float16"),
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32), ""),
        (torch.tensor([1.0, 1.4, 1.0]).half(), Near(ONE, ONE / 2), ""),
        (torch.tensor([1.0, 1.6, 1.0]).half(), Near(ONE, ONE / 2), "first at [1]: 1.599609375, must be 1.0 (within"),
        (torch.tensor([1.0, NAN, 1.0]).half(), Near(ONE, ONE / 2), "first at [1]: nan"),
    ],
)
def test_differences(got: Tensor, want: Tensor | Near, says: str) -> None:
    found = difference(got, want)
    assert says in found
    assert bool(says) == bool(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_errs_by_half_an_ulp(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.randn(4000, dtype=torch.float64)
    values = torch.cat((values, values * tiny, values * 64))
    error = (values.to(dtype).double() - values).abs()
    assert bool((error <= half_ulp(values, dtype)).all())
    assert bool((error > 0.9 * half_ulp(values, dtype)).any())


# ── verdicts and the command ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [BuildError("no such header", kernel="qcut_x"), RuntimeError("CUDA error: boom")])
def test_what_cannot_be_built_or_launched_has_failed(error: Exception) -> None:
    def fails() -> Sequence[Tensor]:
        raise error

    assert str(error) in run_check(Check("norm", "1x1", fails), CPU).problem


def test_kernels_without_a_compiler_are_skipped() -> None:
    fine = Check("norm", "1x1", lambda: torch.zeros(2))
    right, skipped = run_checks([fine, replace(fine, toolchain="nvcc")], CPU, nvcc=False)
    assert right == Verdict("norm", "1x1")
    assert "nvcc" in skipped.skipped


def test_a_lost_device_runs_no_further_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    ran: list[bool] = []
    check = Check("norm", "1x1", lambda: torch.full((2,), ran.append(True) or 0.0))
    verdicts = run_checks([check, check], torch.device("cuda", 0), nvcc=True)
    assert len(ran) == 2  # the first check, and its reference
    assert verdicts[-1].skipped == "the device is lost: CUDA error: an illegal memory access was encountered"


def test_every_gpu_is_tested_and_decides_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Verdict("norm", "rms 5x1280 float16", ("qcut_norm_sm90a",))
    verdicts = {0: [right, Verdict("int8_cutlass", "1x1", skipped="no nvcc")], 1: [right]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(selftest, "target", lambda ordinal: H200)
    monkeypatch.setattr(selftest, "selftest", lambda ordinal, progress: verdicts[ordinal])
    assert main(["doctor", "--selftest"]) == 0
    text = capsys.readouterr().out
    for part in ("cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200", "1 right, 0 wrong, 1 not run", "qcut_norm_sm90a"):
        assert part in text
    verdicts[1][0] = replace(right, problem="1 of 2 values differ")
    assert main(["doctor", "--selftest", "--device", "0"]) == 0
    assert "cuda:1" not in capsys.readouterr().out
    assert main(["doctor", "--selftest", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["healthy"]
    wrong = [(each["gpu"], each["problem"]) for each in answer["selftest"] if each["problem"]]
    assert wrong == [(1, "1 of 2 values differ")]
    with pytest.raises(DeviceError, match="allowed: 0 to 1"):
        selftest.selftest_gpus(2)
