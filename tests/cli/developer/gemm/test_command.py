"""`qcut gemm`: flags, options, the CPU's answer, and the GPU's with a clock, a library and a kernel made of torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.cli import main as cli
from qcut.cli.developer.gemm import check
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.families import family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.jit.waiting import build_mode
from qcut.ops.gemm import GemmS8Op
from qcut.tuning.cublaslt import CublasLtError
from tests.cli.commands import answer as answer_of
from tests.cli.commands import run
from tests.support.fakes.clock import FixedClock

H200 = Target("sm_90a", 132, "NVIDIA H200")
LAYOUTS = ["".join(flags) for flags in itertools.product("tn", repeat=3)]
KEYS = {
    *("m", "n", "k", "layouts", "tensor_cores", "mode", "scale", "seed", "device"),
    *("kernel", "family", "tile", "reason", "checked", "wrong"),
    *("timing", "tops", "gb_s", "cublaslt", "x_cublaslt", "notes"),
}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return answer_of(capsys, "gemm", *arguments)


# ── the command line ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "layouts", "tensor_cores"),
    [
        ("", "tnt", True),
        ("1 0 1 1", "tnt", True),
        ("1 0 1 0", "tnt", False),
        ("0 1 0", "ntn", True),
        ("T N T", "tnt", True),
        ("n t N 0", "ntn", False),
        ("T 1 n 1", "ttn", True),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_flags(flags: str, layouts: str, tensor_cores: bool, capsys: pytest.CaptureFixture[str]) -> None:
    answer = said(capsys, "3", "4", "5", *flags.split())
    assert (answer["layouts"], answer["tensor_cores"]) == (layouts, tensor_cores)


@pytest.mark.usefixtures("no_gpu")
def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    answer = said(
        capsys, *["3", "4", "5", "1", "0", "0", "0", "--kernel", "simt", "--no-check", "--scale", "0.5", "--seed", "7"]
    )
    names = ("layouts", "tensor_cores", "mode", "checked", "scale", "seed")
    assert [answer[name] for name in names] == ["tnn", False, "saturate", False, 0.5, 7]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("3 4", "the following arguments are required: K"),
        ("3 4 0", "'0' is not a whole number from 1 up"),
        ("3 -4 5", "'-4' is not a whole number from 1 up"),
        ("3 4 5 2 0 1", "transA is '2'; allowed: T or 1 (row-major) and N or 0 (column-major)"),
        ("3 4 5 1 C 1", "transB is 'C'; allowed: T or 1 (row-major) and N or 0 (column-major)"),
        ("3 4 5 1 0 x 1", "transC is 'x'; allowed"),
        ("3 4 5 1 0 1 T", "use_tensor_cores is 'T'; allowed: 1 and 0 (dp4a)"),
        ("3 4 5 1", "1 flags; allowed: none, or transA transB transC, each T or 1 (row-major) or N or 0 (column"),
        ("3 4 5 1 0 1 1 1", "5 flags; allowed"),
        ("3 4 5 --kernel cublas", "invalid choice: 'cublas'"),
        ("3 4 5 --tile 64x64x64", "--tile needs --kernel, one of cutlass, mma, wmma, simt"),
        ("3 4 5 1 0 1 0 --kernel wmma", "--kernel wmma runs on tensor cores, use_tensor_cores is 0"),
        ("3 4 5 --mode wrap --scale 2", "--scale is for --mode saturate"),
        ("3 4 5 --scale 0", "'0' is not a number above 0"),
        ("3 4 5 --scale nan", "'nan' is not a number above 0"),
    ],
)
def test_wrong_command_lines(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "gemm", *command.split())
    assert status == 2
    assert message in " ".join(err.split())


def test_help_says_which_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "gemm", "--help")
    assert status == 0
    assert "qcut gemm M N K [transA transB transC] [use_tensor_cores]" in out
    assert "T or 1 for a row-major matrix, N or 0 for a column-major one" in " ".join(out.split())


# ── without a GPU ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("mode", ["saturate", "wrap"])
def test_the_reference_runs_and_is_checked(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in itertools.product("10", repeat=4):
        answer = said(capsys, "37", "29", "41", *flags, "--mode", mode, "--seed", "3")
        assert set(answer) == KEYS | {"schema", "status"}
        assert answer["layouts"] == "".join("t" if flag == "1" else "n" for flag in flags[:3])
        assert answer["tensor_cores"] == (flags[3] == "1")
        assert (answer["device"], answer["kernel"], answer["mode"], answer["seed"]) == ("cpu", "reference", mode, 3)
        assert (answer["checked"], answer["wrong"]) == (True, 0)
        not_timed = ("timing", "tops", "cublaslt", "x_cublaslt", "family")
        assert {answer[key] for key in not_timed} == {None}
        assert answer["notes"] == ["no CUDA device: the CPU's reference ran, and nothing is timed"]


@pytest.mark.usefixtures("no_gpu")
def test_the_answer_without_a_gpu_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gemm", "5", "7", "9", "--kernel", "mma"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "C = A B, 5 x 7 x 9, A row-major, B column-major, C row-major; int8, scale 0.002441, saturated"
    )
    assert "checked   all 35 elements equal the exact result" in out
    assert "no CUDA device: the CPU's reference ran, and nothing is timed" in out
    assert "--kernel and --tile chose nothing" in out
    assert "TOPS" not in out
    assert cli.main(["gemm", "5", "7", "9", "--no-check"]) == 0
    assert "checked" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("mode", ["saturate", "wrap"])
def test_one_wrong_element_is_found(
    monkeypatch: pytest.MonkeyPatch, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    real = check.product

    def product(*arguments: Any) -> Tensor:
        got = real(*arguments)
        got[-1, -1] ^= 1
        return got

    monkeypatch.setattr(check, "product", product)
    assert cli.main(["gemm", "70", "50", "33", "1", "1", "0", "--mode", mode]) == 1
    assert "WRONG     1 of 3500 elements differ from the exact result" in capsys.readouterr().out


# ── with a GPU made of torch ─────────────────────────────────────────────────────────────────────


class Library:
    """`Int8Matmul` in torch: the layouts of ``supported``, two algorithms, ``error`` added to every result."""

    supported = ("tnt", "tnn")
    error = 0

    def __init__(self, m: int, n: int, k: int, requested: int = 8, layouts: str = "tnt") -> None:
        if layouts not in self.supported:
            raise CublasLtError(f"no int8 algorithm for layouts {layouts}")
        self.layouts = layouts

    def run(self, a: Tensor, b: Tensor, d: Tensor, alpha: float, algorithm: int) -> None:
        assert (a.stride(1) == 1) == (self.layouts[0] == "t")
        assert (b.stride(1) == 1) == (self.layouts[1] == "n")
        out = d.view(len(a), len(b)) if self.layouts[2] == "t" else d.view(len(b), len(a)).t()
        out.copy_((a.double() @ b.double().t() * alpha).round().clamp(-128, 127) + self.error)

    def best(self, time_us: Callable[[int], float]) -> int:
        return min((time_us(number), number) for number in range(2))[1]

    def describe(self, algorithm: int) -> str:
        return f"cublaslt_id{algorithm}"


class GpuOfTorch:
    """Stands in for the H200 that `qcut gemm` finds; its kernels are the CPU's reference."""

    def __init__(self) -> None:
        self.forced: list[Choice] = []
        """The choices that products were forced to."""
        self.kernel: Callable[[GemmS8Op], Tensor] = GemmS8Op.cpu

    def gemm_s8(self, call: GemmS8Op, choice: Choice) -> Tensor:
        self.forced.append(choice)
        return self.kernel(call)


@pytest.fixture
def gpu_of_torch(monkeypatch: pytest.MonkeyPatch) -> GpuOfTorch:
    """Runs the GPU's path on the CPU."""
    stand_in = GpuOfTorch()
    gpu = check.Gpu(
        H200, False, stand_in.gemm_s8, FixedClock(1000.0), copies=lambda size: 2, matmul=Library, device="cpu"
    )
    monkeypatch.setattr(check, "current_gpu", lambda: gpu)
    return stand_in


@pytest.mark.parametrize("mode", ["saturate", "wrap"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_figures(gpu_of_torch: GpuOfTorch, layouts: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag.upper() for flag in layouts]
    answer = said(capsys, "64", "32", "48", *flags, "--mode", mode)
    assert set(answer) == KEYS | {"schema", "status"}
    assert answer["device"] == "NVIDIA H200"
    assert answer["family"]
    assert answer["reason"]
    assert answer["tile"] in answer["kernel"]
    assert (answer["checked"], answer["wrong"]) == (True, 0)
    assert not gpu_of_torch.forced, "dispatch's choice is the operator's own affair"
    figures = answer["timing"]
    assert set(figures) == {"median_us", "p20_us", "p80_us", "samples", "mode"}
    assert figures["mode"] == "graph"
    assert answer["tops"] == pytest.approx(2 * 64 * 32 * 48 / figures["median_us"] / 1e6)
    assert answer["gb_s"] == pytest.approx((64 * 48 + 32 * 48 + 64 * 32) / figures["median_us"] / 1e3)
    baseline = answer["cublaslt"]
    assert baseline["layouts"] == (layouts if layouts in Library.supported else "tnt")
    assert baseline["kernel"] == "cublaslt_id0"
    assert answer["x_cublaslt"] == pytest.approx(baseline["timing"]["median_us"] / figures["median_us"])
    notes = [] if layouts in Library.supported else [f"no int8 algorithm for layouts {layouts}; compared with its tnt"]
    assert [note.split(",")[0] for note in answer["notes"]] == notes


def test_figures_as_text(gpu_of_torch: GpuOfTorch, capsys: pytest.CaptureFixture[str]) -> None:
    name = family("int8_mma").default_tiles(GemmProblem(), "sm_90a")[1].name
    assert cli.main(["gemm", "64", "32", "48", "--kernel", "mma", "--tile", name]) == 0
    out = capsys.readouterr().out
    assert f"_{name}\n" in out
    assert "chosen    int8_mma: asked for" in out
    assert "checked   all 2048 elements equal the exact result" in out
    assert "TOPS, " in out
    assert "qcut has 1.00x its speed" in out
    assert {choice.tile.name for choice in gpu_of_torch.forced} == {name}


def test_nothing_to_compare_with(
    gpu_of_torch: GpuOfTorch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "64", "32", "48", "--compare", "none")["cublaslt"] is None
    monkeypatch.setattr(Library, "supported", ())
    answer = said(capsys, "64", "32", "48")
    assert answer["cublaslt"] is answer["x_cublaslt"] is None
    assert answer["notes"] == ["not compared: no int8 algorithm for layouts tnt"]
    monkeypatch.setattr(Library, "supported", LAYOUTS)
    monkeypatch.setattr(Library, "error", 1)
    answer = said(capsys, "64", "32", "48")
    assert answer["cublaslt"] is None
    assert "cuBLASLt's result is off by" in answer["notes"][0]


def test_a_wrong_result_is_not_timed(gpu_of_torch: GpuOfTorch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_of_torch.kernel = lambda call: torch.zeros(64, 32, dtype=torch.int8)
    assert cli.main(["gemm", "64", "32", "48", "--kernel", "mma", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["wrong"] > 1900
    assert answer["timing"] is None
    assert answer["notes"] == ["a wrong result is not timed"]


def test_too_large_for_the_gpu_is_one_line(gpu_of_torch: GpuOfTorch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(call: GemmS8Op) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.\nMore")

    gpu_of_torch.kernel = full
    assert cli.main(["gemm", "64", "32", "48", "--kernel", "mma"]) == 1
    expected = "qcut: 64 x 32 x 48 does not fit the GPU's memory: CUDA out of memory. Tried to allocate a lot.\n"
    assert capsys.readouterr().err == expected


def test_the_kernel_that_is_named_is_waited_for(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    """Nothing that serves while nvcc builds that kernel is timed in its place."""
    monkeypatch.setenv("QCUT_BUILD", "background")
    real, waits = check.product, []

    def product(*arguments: Any) -> Tensor:
        waits.append(build_mode() == "wait")
        return real(*arguments)

    monkeypatch.setattr(check, "product", product)
    assert cli.main(["gemm", "3", "5", "7"]) == 0
    assert waits == [True]
    assert build_mode() == "background"
