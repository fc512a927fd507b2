"""W8A8 layers of rows about which more is known, on the CPU: bitwise `w8a8_linear`, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (ops registers torch.ops.qcut)
from qcut.emitters.stream.w8a8 import MAX_ROWS
from qcut.ops.linear import FEW_ROWS
from qcut.schemes import padded_k
from tests.support.oracles import FLOATS, layer, tokens

OPS = torch.ops.qcut
N, K = 7, 21
KP = padded_k(K)


def projection(*, bias: bool = True, activation: str = "none") -> tuple[Any, ...]:
    w = layer(N, K)
    return w["qweight"], w["scale"], w["bias"] if bias else None, activation


def largest(x: Tensor) -> Tensor:
    return x.float().abs().amax(1)


def assert_bitwise(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [0, 1, 5])
def test_both_are_w8a8_linear(dtype: torch.dtype, m: int) -> None:
    x, linear = tokens(m, K, dtype=dtype), projection()
    want = OPS.w8a8_linear(x, *linear)
    q, scale = OPS.quantize_per_token(x, KP)
    absmax = torch.zeros(m)
    assert_bitwise(OPS.int8_linear(q, scale, *linear, dtype, absmax), want)
    assert_bitwise(OPS.int8_linear(q, scale, *linear, dtype), want)
    assert_bitwise(absmax, largest(want) if m else absmax)
    assert_bitwise(OPS.noted_linear(x, largest(x) if m else absmax, *linear), want)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_erf", "gelu_tanh", "silu"])
@pytest.mark.parametrize("bias", [True, False])
def test_epilogues(activation: str, bias: bool) -> None:
    x, linear = tokens(4, K, dtype=torch.float16), projection(bias=bias, activation=activation)
    want, absmax = OPS.w8a8_linear(x, *linear), torch.zeros(4)
    assert_bitwise(OPS.int8_linear(*OPS.quantize_per_token(x, KP), *linear, torch.float16, absmax), want)
    assert_bitwise(absmax, largest(want))
    assert_bitwise(OPS.noted_linear(x, largest(x), *linear), want)


def test_absmax_is_only_raised_and_keeps_nan() -> None:
    x, linear = tokens(4, K, dtype=torch.float32), projection()
    x[2, 3] = float("nan")
    absmax = torch.tensor([0.0, 1e30, 1.0, float("nan")])
    y = OPS.int8_linear(*OPS.quantize_per_token(x, KP), *linear, torch.float32, absmax)
    assert absmax[0] == y[0].abs().max()
    assert absmax[1] == 1e30
    assert absmax[2:].isnan().all()


def test_few_rows_are_those_of_the_kernels() -> None:
    assert FEW_ROWS == MAX_ROWS


@pytest.mark.parametrize("op", ["silu_mul", "gelu_tanh"])
def test_activations_note_absmax(op: str) -> None:
    x, absmax = tokens(2, 5, dtype=torch.float16), torch.zeros(2)
    given = (x, x) if op == "silu_mul" else (x,)
    y = getattr(OPS, op)(*given, absmax)
    assert_bitwise(y, getattr(OPS, op)(*given))
    assert_bitwise(absmax, largest(y))


# ── registration ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [0, 3])
def test_fakes_have_shapes_and_types(dtype: torch.dtype, m: int) -> None:
    linear = [v.to("meta") if isinstance(v, Tensor) else v for v in projection()]
    x, rows = torch.empty(m, K, dtype=dtype, device="meta"), torch.empty(m, device="meta")
    q = torch.empty(m, KP, dtype=torch.int8, device="meta")
    for y in (OPS.int8_linear(q, rows, *linear, dtype, rows), OPS.noted_linear(x, rows, *linear)):
        assert (y.shape, y.dtype, y.device.type) == ((m, N), dtype, "meta")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    x, linear = tokens(5, K, dtype=torch.float32), projection(activation="relu")
    q, scale = OPS.quantize_per_token(x, KP)
    for absmax in (None, torch.zeros(5)):
        torch.library.opcheck(OPS.int8_linear.default, (q, scale, *linear, torch.float16, absmax))
        torch.library.opcheck(OPS.silu_mul.default, (x, x, absmax))
        torch.library.opcheck(OPS.gelu_tanh.default, (x, absmax))
    torch.library.opcheck(OPS.noted_linear.default, (x, largest(x), *linear))
    torch.library.opcheck(OPS.noted_linear.default, (x.t().contiguous().t(), largest(x), *linear))


def test_compiles_whole() -> None:
    x, linear, again = tokens(5, K, dtype=torch.float32), projection(), layer(K, N)

    def step(x: Tensor) -> Tensor:
        absmax = torch.zeros(len(x))
        y = OPS.int8_linear(*OPS.quantize_per_token(x, KP), *linear, torch.float32, absmax)
        z: Tensor = OPS.noted_linear(y, absmax, again["qweight"], again["scale"], None, "none")
        return z

    assert_bitwise(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))
