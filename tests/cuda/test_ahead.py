"""What products are told to ask for ahead, and what their kernels are launched with, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.cuda import ahead as ahead_cuda
from qcut.cuda import codebook as codebook_cuda
from qcut.cuda import gemm as gemm_cuda
from qcut.cuda import linear as linear_cuda
from qcut.cuda.plans import LaunchSpec
from qcut.dispatch.gpus import Target
from qcut.layers import codebook, int8, rotations
from qcut.layers.base import Linear
from qcut.ops.codebook import CodebookGemm, CodebookGemv
from qcut.ops.linear import Int8Linear, LinearWithAbsmax, W8A8Linear, W8A16Linear
from tests.support.launches import A100, H200

HALF = torch.float16
CLOSED = Target("sm_90a", 132, "NVIDIA H200", closed=True)


class Plan:
    """A plan that notes the arguments of its launches by name."""

    row_multiple, needs_workspace = 1, False

    def __init__(self, spec: LaunchSpec, noted: list[dict[str, Any]]) -> None:
        self.spec, self.noted, self.asks = spec, noted, spec.asks

    def rows_for(self, m: int) -> int:
        return m

    def for_native(self) -> None:
        """Python launches."""

    def launch(self, m: int, args: tuple[Any, ...], *_: Any) -> None:
        names = [p.name for p in self.spec.source.params]
        self.noted.append({"kernel": self.spec.source.name, **dict(zip(names, (*args, *self.spec.tail), strict=True))})

    run = launch


@pytest.fixture
def noted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    launches: list[dict[str, Any]] = []
    gpu = getattr(request, "param", H200)
    for module in (linear_cuda, codebook_cuda, ahead_cuda):
        monkeypatch.setattr(module, "target", lambda device: gpu)
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: False)
    monkeypatch.setattr(codebook_cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(LaunchSpec, "load", lambda spec, device: Plan(spec, launches))
    for module in (linear_cuda, codebook_cuda):
        for name in [name for name in vars(module) if name.endswith("_plans") or name in ("_plans", "_called")]:
            monkeypatch.setattr(module, name, type(getattr(module, name))())
    monkeypatch.setattr(codebook, "_has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)
    for module, name, serve, kind in (
        (codebook, "_GEMV", codebook_cuda.codebook_gemv, CodebookGemv),
        (codebook, "_GEMM", codebook_cuda.codebook_gemm, CodebookGemm),
        (int8, "_W8A8", linear_cuda.w8a8_linear, W8A8Linear),
        (int8, "_W8A16", linear_cuda.w8a16_linear, W8A16Linear),
        (int8, "_INT8", linear_cuda.int8_linear, Int8Linear),
        (int8, "_WITH_ABSMAX", linear_cuda.linear_with_absmax, LinearWithAbsmax),
    ):
        monkeypatch.setattr(module, name, lambda *args, serve=serve, kind=kind: serve(kind(*args)))
    return launches


def layer(scheme: str) -> Any:
    torch.manual_seed(0)
    return Linear.from_float(torch.nn.Linear(1280, 320), scheme)


AHEAD = torch.zeros(5, 100, dtype=torch.uint8)
CASES = [(scheme, m) for scheme in ("w8a8", "w8a16", "codebook4", "codebook4_int8") for m in (1, 8)]


@pytest.mark.parametrize(("scheme", "m"), CASES)
def test_kernels_are_launched_with_it(scheme: str, m: int, noted: list[dict[str, Any]]) -> None:
    made, x = layer(scheme), torch.randn(m, 1280).half()
    made(x)
    made(x, ahead=AHEAD)
    plain, asking = (launch for launch in noted if "stream" in launch["kernel"])
    assert asking["kernel"] == f"{plain['kernel']}_ahead"
    assert "ahead" not in plain
    got = [asking[name] for name in ("ahead", "ahead_stride", "ahead_bytes", "ahead_parts")]
    assert got == [AHEAD.data_ptr(), 100, 96, 0], "parts that do not start at multiples of 16 bytes"
    whole = torch.zeros(5, 1 << 21, dtype=torch.uint8)
    made(x, ahead=whole)
    got = [noted[-1][name] for name in ("ahead", "ahead_stride", "ahead_bytes", "ahead_parts")]
    assert got == [whole.data_ptr(), 1 << 21, 0xFFFF0, 5]


def test_rows_that_were_quantized_or_noted_before_ask_too(noted: list[dict[str, Any]]) -> None:
    made, x = layer("w8a8"), torch.randn(4, 1280).half()
    made.forward_int8(torch.zeros(4, 1280, dtype=torch.int8), torch.ones(4), HALF, torch.zeros(4), AHEAD[:, :64])
    made.forward_with_absmax(x, torch.ones(4), AHEAD[:, :64])
    assert [launch["ahead_bytes"] for launch in noted] == [64, 64]


@pytest.mark.parametrize("noted", [A100, CLOSED], indirect=True, ids=["sm_80", "closed"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4"])
def test_other_gpus_do_not_ask(scheme: str, noted: list[dict[str, Any]]) -> None:
    made = layer(scheme)
    made(torch.randn(1, 1280).half(), ahead=AHEAD)
    assert all("ahead" not in launch for launch in noted)
    assert views(made, 1) is None


def test_kernels_of_many_tokens_do_not_ask(noted: list[dict[str, Any]]) -> None:
    made = layer("codebook4")
    made(torch.randn(80, 1280).half(), ahead=AHEAD)
    assert all("ahead" not in launch for launch in noted)
    assert views(made, 80) is None


def views(made: Any, rows: int) -> Tensor | None:
    """`first_read` of a layer, as if its weight were on the GPU."""
    calls = made.cuda_calls(
        made.scheme, dtype=HALF, rows=rows, n=made.out_features, k=1280, bias=True, activation="none"
    )
    name, count = made.streamed
    return ahead_cuda.first_read(made._buffers[name], count * made._buffers[name][0].nbytes, calls)


@pytest.mark.parametrize(("scheme", "m"), CASES)
def test_parts_begin_where_ctas_do(
    scheme: str, m: int, noted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layer(scheme)
    weight = made._buffers[made.streamed[0]]
    stride = made.streamed[1] * weight[0].nbytes  # of 16 rows: there are fewer than multiprocessors
    for budget, size in ((8 << 20, stride), (20 * 100, 96), (20 * 16, 16)):
        monkeypatch.setattr(ahead_cuda, "BYTES", budget)
        view = views(made, m)
        assert view is not None
        assert (view.dtype, view.shape, view.stride()) == (torch.uint8, (20, size), (stride, 1))
        assert view.data_ptr() == weight.data_ptr()
    for budget in (0, 20 * 15):
        monkeypatch.setattr(ahead_cuda, "BYTES", budget)
        assert views(made, m) is None


def test_a_shorter_last_part_is_left_out(noted: list[dict[str, Any]]) -> None:
    call = linear_cuda.LinearLayer("w8a8", HALF, 1, 16 * 133, 4096, True, "none", True)
    assert call.launches(0)[-1].row_tiles == 2
    view = ahead_cuda.first_read(torch.zeros(16 * 133, 4096, dtype=torch.int8), 16 * 4096, [call])
    assert view is not None
    assert (*view.shape, *view.stride()) == (66, (8 << 20) // 67 // 16 * 16, 2 * 16 * 4096, 1)
