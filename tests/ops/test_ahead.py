"""``ahead`` of operators: a hint that changes no result, and is refused where it cannot be memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcut.config import StaticRange
from qcut.errors import DeviceError, DtypeError, QcutError, ShapeError
from qcut.layers import codebook, rotations
from qcut.layers.base import Linear
from qcut.layers.int8 import W8A8Linear

HALF = torch.float16
AHEAD = torch.zeros(6, 64, dtype=torch.uint8)


def layer(scheme: str) -> Any:
    torch.manual_seed(0)
    given = {"static_range": StaticRange(-1.0, 1.0)} if scheme == "w8a8_static" else {}
    return Linear.from_float(torch.nn.Linear(256, 64), scheme, **given)


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codebook layers call the operators that kernels compute on CUDA."""
    monkeypatch.setattr(codebook, "_has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)


@pytest.mark.parametrize(
    "scheme",
    ["w8a8", "w8a8_static", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook4_g256", "codebook4+2"],
)
@pytest.mark.parametrize("m", [1, 8])
def test_results_do_not_depend_on_it(scheme: str, m: int) -> None:
    made, x = layer(scheme), torch.randn(m, 256).half()
    want = made(x)
    for ahead in (AHEAD, AHEAD[::2, :33], AHEAD[:0], AHEAD[:, :0]):
        assert torch.equal(made(x, ahead=ahead), want)
    assert made.first_read(m, HALF) is None, "on the CPU"


@pytest.mark.parametrize(
    ("ahead", "error", "message"),
    [
        (AHEAD.char(), DtypeError, "ahead is int8; allowed: uint8"),
        (AHEAD[0], ShapeError, r"ahead has shape \[64\]"),
        (AHEAD.t(), ShapeError, r"strides \[1, 64\]; allowed: \[parts, bytes\]"),
        (AHEAD.to("meta"), DeviceError, "ahead is on meta"),
    ],
)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "w8a16", "codebook4", "codebook4_g256"])
def test_other_tensors_are_refused(scheme: str, ahead: torch.Tensor, error: type[QcutError], message: str) -> None:
    with pytest.raises(error, match=message):
        layer(scheme)(torch.randn(1, 256).half(), ahead=ahead)


def test_int8_rows_and_rows_with_absmax_take_it() -> None:
    made, x = layer("w8a8"), torch.randn(3, 256).half()
    assert isinstance(made, W8A8Linear)
    q, scale = torch.ops.qcut.quantize_per_token(x, 256)
    want = made(x)
    absmax = x.abs().amax(1).float()
    assert torch.equal(made.forward_int8(q, scale, HALF, ahead=AHEAD), want)
    assert torch.equal(made.forward_with_absmax(x, absmax, AHEAD), want)
    for call in (lambda: made.forward_int8(q, scale, HALF, None, AHEAD[0]),
                 lambda: made.forward_with_absmax(x, absmax, AHEAD[0])):  # fmt: skip
        with pytest.raises(ShapeError, match="ahead has shape"):
            call()
