"""W8A8 layers of rows about which more is known, on the CPU: bitwise `w8a8_linear`, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (ops registers torch.ops.qcut)
from qcut import errors
from qcut.emitters.stream.w8a8 import MAX_ROWS
from qcut.numerics import int8 as numerics
from qcut.ops.linear import FEW_ROWS
from qcut.schemes import K_MAX, padded_k
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


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in arguments.items()}


def called(op: str, device: str, *, m: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The operator with all it takes, on a device, but for changes, which stay where they are."""
    given = dict(zip(("qweight", "weight_scale", "bias", "activation"), projection(), strict=True))
    x = tokens(m, K, dtype=dtype)
    if op == "int8_linear":
        q, q_scale = numerics.quantize_per_token_ref(x, KP)
        given |= {"q": q, "q_scale": q_scale, "dtype": dtype, "absmax": torch.zeros(m)}
    else:
        given |= {"x": x, "x_absmax": largest(x) if m else torch.zeros(0)}
    return getattr(OPS, op)(**{**on(device, given), **changes})


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


def test_absmax_is_raised_not_set_and_nan_is_the_largest() -> None:
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
@pytest.mark.parametrize("op", ["int8_linear", "noted_linear"])
def test_fakes_have_shapes_and_types(op: str, dtype: torch.dtype, m: int) -> None:
    y = called(op, "meta", m=m, dtype=dtype)
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


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

S8 = torch.int8
OF_BOTH = [
    ({"qweight": torch.zeros(N, 32)}, errors.DtypeError, "qweight is float32; allowed: int8"),
    ({"weight_scale": torch.ones(N).half()}, errors.DtypeError, "weight_scale is float16; allowed: float32"),
    ({"weight_scale": torch.ones(6)}, errors.ShapeError, r"weight_scale has shape \[6\]; allowed: \[7\]"),
    ({"bias": torch.ones(N).half()}, errors.DtypeError, "bias is float16; allowed: float32"),
    ({"bias": torch.ones(1, N)}, errors.ShapeError, r"bias has shape \[1, 7\]; allowed: \[7\]"),
]
OF_INT8 = [
    ({"q": torch.zeros(3, KP)}, errors.DtypeError, "q is float32; allowed: int8"),
    ({"q": torch.zeros(3, K, dtype=S8)}, errors.ShapeError, r"q has shape \[3, 21\]; allowed: \[rows, K\], K a mult"),
    ({"q": torch.zeros(3, 48, dtype=S8)}, errors.ShapeError, r"q has shape \[3, 48\]; allowed: \[3, 32\]"),
    ({"q": torch.zeros(KP, dtype=S8)}, errors.ShapeError, r"q has shape \[32\]; allowed: \[rows, K\]"),
    ({"q_scale": torch.ones(2)}, errors.ShapeError, r"q_scale has shape \[2\]; allowed: \[3\]"),
    ({"dtype": torch.float64}, errors.DtypeError, "dtype is float64; allowed: float16, bfloat16, float32"),
    ({"absmax": torch.zeros(3).half()}, errors.DtypeError, "absmax is float16; allowed: float32"),
    ({"absmax": torch.zeros(4)}, errors.ShapeError, r"absmax has shape \[4\]; allowed: \[3\]"),
    ({"absmax": torch.zeros(6)[::2]}, errors.ShapeError, r"absmax has strides \[2\]; allowed: contiguous"),
]
OF_NOTED = [
    ({"x": torch.zeros(3)}, errors.ShapeError, r"x has shape \[3\]; allowed: \[M, K\]"),
    ({"x": torch.zeros(3, K).double()}, errors.DtypeError, "x is float64; allowed: float16, bfloat16, float32"),
    ({"x": torch.zeros(3, 40)}, errors.ShapeError, r"x has K = 40, .* shape \[7, 32\]; .*\[N, 48\]"),
    ({"x_absmax": torch.zeros(4)}, errors.ShapeError, r"x_absmax has shape \[4\]; allowed: \[3\]"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("op", "changes", "error", "message"),
    [
        *(("int8_linear", *case) for case in OF_BOTH + OF_INT8),
        *(("noted_linear", *case) for case in OF_BOTH + OF_NOTED),
    ],
)
def test_refusals_name_the_operator_and_what_is_allowed(
    op: str, changes: dict[str, Any], error: Any, message: str, device: str
) -> None:
    moved = changes if "strides" in message else on(device, changes)
    if "strides" in message and device == "meta":
        moved = {"absmax": torch.zeros(6, device="meta")[::2]}
    with pytest.raises(error, match=f"^qcut::{op}: {message}"):
        called(op, device, **moved)


@pytest.mark.parametrize("op", ["int8_linear", "noted_linear"])
def test_activations_and_sizes_are_refused(op: str) -> None:
    with pytest.raises(errors.ConfigError, match="activation 'gelu' does not exist; use one of none, relu"):
        called(op, "cpu", activation="gelu")
    k = padded_k(K_MAX + 1)
    wide = torch.empty(3, k, dtype=S8 if op == "int8_linear" else torch.float32, device="meta")
    with pytest.raises(errors.QcutError, match=f"qcut::{op}: .*{K_MAX}"):
        called(
            op, "meta", qweight=torch.empty(N, k, dtype=S8, device="meta"), **{"q" if wide.dtype is S8 else "x": wide}
        )


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("int8_linear", name) for name in ("q_scale", "weight_scale", "bias", "absmax")),
        *(("noted_linear", name) for name in ("x_absmax", "qweight", "weight_scale", "bias")),
    ],
)
def test_mixed_devices_are_refused(op: str, name: str) -> None:
    size = {"qweight": (N, KP), "q_scale": (3,), "absmax": (3,), "x_absmax": (3,)}.get(name, (N,))
    there = torch.empty(size, dtype=S8 if name == "qweight" else torch.float32, device="meta")
    with pytest.raises(errors.DeviceError, match=f"{op}: {name} is on meta; the first argument is on cpu"):
        called(op, "cpu", **{name: there})
