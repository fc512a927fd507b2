"""``qcut doctor --selftest`` without a GPU: its checks on the CPU, what it calls a difference, what it reports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qcut.cli.main import main
from qcut.cli.selftest import run
from qcut.cli.selftest.bounds import Near, half_ulp
from qcut.cli.selftest.checks import Check, all_checks, slow_sources
from qcut.cli.selftest.run import Verdict, difference, run_check, selftest
from qcut.dispatch.gpus import GPUS
from qcut.errors import BuildError, DeviceError
from tests.support.launches import H200

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return all_checks()


def test_the_cpu_passes_its_own_test(checks: list[Check]) -> None:
    """So data, calls and bounds are consistent. A dense rotation's kernel reads 16-bit matrices, the CPU does not."""
    verdicts = [run_check(check, CPU) for check in checks if check.family != "rotate_dense"]
    assert [str(v) for v in verdicts if v.problem] == []


def test_every_family_has_a_check(checks: list[Check]) -> None:
    families = {check.family for check in checks}
    assert families >= {"int8_mma", "int8_wmma", "int8_dp4a", "int8_cutlass", "int8_stream", "w8a16_mma"}
    assert families >= {"w8a16_stream", "codebook", "rotate", "rotate_dense", "norm", "append_kv", "attention", "embed"}
    assert families >= {"argmax", "advance", "quantize_per_token", "quantize_per_tensor", "silu_mul", "gelu_tanh"}
    assert len({(check.family, check.shape) for check in checks}) == len(checks)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_slow_families_exist_on_every_gpu(gpu: run.Target) -> None:
    names = [source.name for source in slow_sources(gpu, cutlass=True)]
    mixed = "w8a16_cutlass" if gpu.arch == "sm_90a" else "w8a16_mma"
    families = ("int8_mma", "int8_wmma", "int8_dp4a", "int8_cutlass", mixed)
    assert all(family in name for family, name in zip(families, names, strict=True))
    assert not any("cutlass" in source.name for source in slow_sources(gpu, cutlass=False))


# ── differences ──────────────────────────────────────────────────────────────────────────────────


def wrong(change: Callable[[Tensor], object]) -> Callable[[torch.device], Sequence[Tensor]]:
    """On any other device than the CPU's reference: the first call is the device's."""
    calls: list[bool] = []

    def compute(device: torch.device) -> Sequence[Tensor]:
        result = torch.arange(24, dtype=torch.int8).view(4, 6)
        if not calls:
            change(result)
        calls.append(True)
        return (result,)

    return compute


def test_one_wrong_bit_is_named_with_its_place() -> None:
    def flip(t: Tensor) -> None:
        t[2, 3] ^= 1
        t[3, 0] ^= 4

    verdict = run_check(Check("int8_mma", "4x6x1", wrong(flip)), CPU)
    assert verdict.problem == "2 of 24 values differ, first at [2, 3]: 14, must be 15 (every bit)"
    assert "[FAIL] int8_mma" in str(verdict)
    assert run_check(Check("int8_mma", "4x6x1", wrong(lambda t: None)), CPU).problem == ""


def test_a_check_that_is_broken_by_its_reference_is_named(checks: list[Check], monkeypatch: pytest.MonkeyPatch) -> None:
    from qcut.numerics import int8

    (check,) = (check for check in checks if check.family == "colsum")
    real = int8.colsum_ref
    answers = [real, lambda q: real(q) + 1]
    monkeypatch.setattr(int8, "colsum_ref", lambda q: answers.pop(0)(q))
    assert run_check(check, CPU).problem.startswith("5 of 5 values differ, first at [0]")


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "first at [1]"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), ""),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 1.0]), "first at [0]: nan"),
        (torch.zeros(2), torch.zeros(3), "torch.float32 [2], not torch.float32 [3]"),
        (torch.zeros(2), torch.zeros(2).half(), "not torch.float16"),
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32), ""),
    ],
)
def test_bitwise_differences(got: Tensor, want: Tensor, says: str) -> None:
    found = difference(got, want)
    assert says in found
    assert bool(says) == bool(found)


@pytest.mark.parametrize(("value", "right"), [(1.0, True), (1.4, True), (1.6, False), (torch.nan, False), (2.0, False)])
def test_differences_beyond_a_bound(value: float, right: bool) -> None:
    near = Near(torch.ones(3, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64))
    found = difference(torch.tensor([1.0, value, 1.0]).half(), near)
    assert (found == "") == right
    assert right or ("first at [1]" in found and "within 0.5" in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_an_ulp_is_the_most_that_rounding_errs(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.randn(4000, dtype=torch.float64)
    values = torch.cat((values, values * tiny, values * 64))
    error = (values.to(dtype).double() - values).abs()
    assert bool((error <= half_ulp(values, dtype)).all())
    assert bool((error > 0.9 * half_ulp(values, dtype)).any())


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [BuildError("no such header", kernel="qcut_x"), RuntimeError("CUDA error: boom")])
def test_what_cannot_be_built_or_launched_has_failed(error: Exception) -> None:
    def fails(device: torch.device) -> Sequence[Tensor]:
        raise error

    assert str(error) in run_check(Check("norm", "1x1", fails), CPU).problem


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """Lets `selftest` run its checks, which the test gives, on the CPU."""
    given: list[Check] = []
    monkeypatch.setattr(run, "all_checks", lambda: given)
    monkeypatch.setattr(run, "slow_sources", lambda gpu, cutlass: [])
    monkeypatch.setattr(run, "target", lambda ordinal: H200)
    monkeypatch.setattr(run.native, "build", lambda: None)
    monkeypatch.setattr(run.jit, "is_toolchain_available", lambda kind: False)
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda ordinal: None)
    return given


def fine(device: torch.device) -> Sequence[Tensor]:
    return (torch.zeros(2),)


def test_kernels_without_a_compiler_are_skipped(on_cpu: list[Check], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu += [Check("norm", "1x1", fine), Check("int8_cutlass", "1x1", fine, toolchain="nvcc")]
    verdicts = selftest(0, progress=False)
    assert verdicts[0] == Verdict("norm", "1x1")
    assert verdicts[1].family == "int8_cutlass"
    assert "nvcc" in verdicts[1].skipped


def test_a_lost_device_runs_no_further_checks(on_cpu: list[Check], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(device: torch.device) -> Sequence[Tensor]:
        ran.append("ran")
        return (torch.zeros(2),)

    def lost(ordinal: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    on_cpu += [Check("norm", "1x1", noted), Check("embed", "1x1", noted)]
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    verdicts = selftest(0, progress=False)
    assert len(ran) == 2  # the first check, and its reference
    assert verdicts[-1].skipped == "the device is lost: CUDA error: an illegal memory access was encountered"


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--selftest"]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err
    assert main(["doctor", "--device", "0"]) == 1
    assert "--device goes with --selftest" in capsys.readouterr().err


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Verdict]]:
    right = Verdict("norm", "rms 5x1280 float16", ("qcut_norm_sm90a",))
    verdicts = {0: [right, Verdict("int8_cutlass", "1x1", skipped="no nvcc")], 1: [right]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(run, "target", lambda ordinal: H200)
    monkeypatch.setattr(run, "selftest", lambda ordinal, progress: verdicts[ordinal])
    return verdicts


def test_every_gpu_is_tested_and_one_that_differs_is_the_status(
    two_gpus: dict[int, list[Verdict]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--selftest"]) == 0
    text = capsys.readouterr().out
    assert "cuda:0 NVIDIA H200" in text
    assert "cuda:1 NVIDIA H200" in text
    assert "1 right, 0 wrong, 1 not run" in text
    assert "qcut_norm_sm90a" in text
    two_gpus[1][0] = replace(two_gpus[1][0], problem="1 of 2 values differ")
    assert main(["doctor", "--selftest"]) == 1
    assert "0 right, 1 wrong, 0 not run" in capsys.readouterr().out
    assert main(["doctor", "--selftest", "--device", "0"]) == 0
    assert "cuda:1" not in capsys.readouterr().out
    assert main(["doctor", "--selftest", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["healthy"]
    assert [(each["gpu"], each["problem"]) for each in answer["selftest"] if each["problem"]] == [
        (1, "1 of 2 values differ")
    ]


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_gpu_that_does_not_exist_is_an_error(two_gpus: dict[int, list[Verdict]], ordinal: int) -> None:
    with pytest.raises(DeviceError, match="allowed: 0 to 1"):
        run.command(ordinal)
