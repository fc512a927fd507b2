"""Norm or gate and W8A8 projection as one operator: on the CPU bitwise the two, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import errors, ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.config import K_MAX, padded_k
from tests.oracles import FLOATS, layer, tokens

OPS = torch.ops.qcut
N, K, EPS = 7, 21, 1e-5
NORMS = {"rms": (False, False), "layer": (True, True), "layer without bias": (True, False)}
"""Whether it is a LayerNorm, and whether it has a bias."""
NORM_NAMES = ("x", "residual", "norm_weight", "norm_bias", "layer", "eps")
LINEAR_NAMES = ("qweight", "weight_scale", "bias", "activation")
LAYOUTS = ("contiguous", "strided", "offset", "transposed", "repeated row")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values behind other strides or another offset, NaN around them; a repeated row is the first."""
    (m, k), nan = x.shape, float("nan")
    if layout == "strided":
        return x.new_full((m, k + 8), nan)[:, 3 : k + 3].copy_(x)
    if layout == "offset":
        return x.new_full((1 + m * k,), nan)[1:].view(m, k).copy_(x)
    if layout == "transposed":
        return x.t().contiguous().t()
    return x[:1].expand(m, k) if layout == "repeated row" else x


def projection(k: int = K, *, bias: bool = True, activation: str = "none") -> tuple[Any, ...]:
    w = layer(N, k)
    return w["qweight"], w["scale"], w["bias"] if bias else None, activation


def norm_inputs(dtype: torch.dtype, kind: str, *, m: int = 5, k: int = K, residual: bool = True) -> tuple[Any, ...]:
    is_layer, bias = NORMS[kind]
    x, other, (weight, norm_bias) = tokens(m, k, dtype=dtype), tokens(m, k, dtype=dtype), tokens(2, k, dtype=dtype)
    return x, other if residual else None, weight, norm_bias if bias else None, is_layer, EPS


def assert_bitwise(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in arguments.items()}


def called(op: str, device: str, *, m: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The operator with all it takes, on a device, but for changes, which stay where they are."""
    linear = dict(zip(LINEAR_NAMES, projection(), strict=True))
    norm = dict(zip(NORM_NAMES, norm_inputs(dtype, "layer", m=m), strict=True))
    given = norm if op == "norm_w8a8" else {"gate": norm["x"], "up": norm["residual"]}
    return getattr(OPS, op)(**{**on(device, {**given, **linear}), **changes})


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_norm_is_the_two_operators(dtype: torch.dtype, kind: str, residual: bool, m: int) -> None:
    norm, linear = norm_inputs(dtype, kind, m=m, residual=residual), projection()
    total, y = OPS.norm_w8a8(*norm, *linear)
    want_total, normed = OPS.add_norm(*norm)
    assert_bitwise(total, want_total)
    assert_bitwise(y, OPS.w8a8_linear(normed, *linear))
    assert total.shape == ((m, K) if residual else (0,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [0, 1, 5])
def test_gate_is_the_two_operators(dtype: torch.dtype, m: int) -> None:
    gate, up, linear = tokens(m, K, dtype=dtype), tokens(m, K, dtype=dtype), projection()
    y = OPS.gate_w8a8(gate, up, *linear)
    assert_bitwise(y, OPS.w8a8_linear(OPS.silu_mul(gate, up), *linear))
    assert y.shape == (m, N)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_does_not_matter(layout: str) -> None:
    x, other, *rest = norm_inputs(torch.float16, "layer")
    linear = projection()
    moved = [laid_out(t, layout) for t in (x, other)]
    plain = [t.contiguous() for t in moved]
    for got, want in zip(OPS.norm_w8a8(*moved, *rest, *linear), OPS.norm_w8a8(*plain, *rest, *linear), strict=True):
        assert_bitwise(got, want)
    assert_bitwise(OPS.gate_w8a8(*moved, *linear), OPS.gate_w8a8(*plain, *linear))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_erf", "gelu_tanh", "silu"])
@pytest.mark.parametrize("bias", [True, False])
def test_epilogues_reach_the_projection(activation: str, bias: bool) -> None:
    norm, linear = norm_inputs(torch.float16, "rms"), projection(bias=bias, activation=activation)
    _, normed = OPS.add_norm(*norm)
    assert_bitwise(OPS.norm_w8a8(*norm, *linear)[1], OPS.w8a8_linear(normed, *linear))
    gate, up = norm[:2]
    assert_bitwise(OPS.gate_w8a8(gate, up, *linear), OPS.w8a8_linear(OPS.silu_mul(gate, up), *linear))


def test_a_bad_token_leaves_the_others_alone() -> None:
    norm, linear = norm_inputs(torch.float16, "rms"), projection()
    total, want = OPS.norm_w8a8(*norm, *linear)
    norm[0][2, 3] = float("nan")
    _, got = OPS.norm_w8a8(*norm, *linear)
    assert got.isnan().any(1).tolist() == [i == 2 for i in range(5)]
    assert_bitwise(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])
    assert not total.isnan().any(), "results are new memory"


# ── registration ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [0, 3])
def test_fakes_have_shapes_and_types(dtype: torch.dtype, m: int) -> None:
    for residual in (True, False):
        total, y = called("norm_w8a8", "meta", m=m, dtype=dtype, **({} if residual else {"residual": None}))
        assert (total.shape, y.shape) == ((m, K) if residual else (0,), (m, N))
        assert total.dtype is y.dtype is dtype
        assert total.device.type == y.device.type == "meta"
    y = called("gate_w8a8", "meta", m=m, dtype=dtype)
    assert (y.shape, y.dtype, y.device.type) == ((m, N), dtype, "meta")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str) -> None:
    linear = projection(activation="relu")
    for kind, residual in (("rms", True), ("layer", False)):
        x, other, *rest = norm_inputs(torch.float32, kind, residual=residual)
        moved = (laid_out(x, layout), None if other is None else laid_out(other, layout))
        torch.library.opcheck(OPS.norm_w8a8.default, (*moved, *rest, *linear))
    gate, up = (laid_out(tokens(5, K, dtype=torch.float32), layout) for _ in range(2))
    torch.library.opcheck(OPS.gate_w8a8.default, (gate, up, *linear))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_whole(layout: str) -> None:
    linear = projection()
    x, other, *rest = norm_inputs(torch.float32, "rms")
    moved = [laid_out(t, layout) for t in (x, other)]

    def step(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *OPS.norm_w8a8(x, other, *rest, *linear), OPS.gate_w8a8(x, other, *linear)

    for got, want in zip(torch.compile(step, backend="aot_eager", fullgraph=True)(*moved), step(*moved), strict=True):
        assert_bitwise(got, want)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

OF_PROJECTION = [
    ({"qweight": torch.zeros(N, 16, dtype=torch.int8)}, errors.ShapeError, r"x has K = 21, .*allowed: \[N, 32\]"),
    (
        {"qweight": torch.zeros(N, K, dtype=torch.int8)},
        errors.ShapeError,
        r"x has K = 21, .* shape \[7, 21\]; .*\[N, 32\]",
    ),
    ({"qweight": torch.zeros(0, 32, dtype=torch.int8)}, errors.ShapeError, r"qweight has shape \[0, 32\]; .*rows >= 1"),
    ({"qweight": torch.zeros(N, 32)}, errors.DtypeError, "qweight is float32; allowed: int8"),
    ({"weight_scale": torch.ones(N).half()}, errors.DtypeError, "weight_scale is float16; allowed: float32"),
    ({"weight_scale": torch.ones(6)}, errors.ShapeError, r"weight_scale has shape \[6\]; allowed: \[7\]"),
    ({"bias": torch.ones(N).half()}, errors.DtypeError, "bias is float16; allowed: float32"),
    ({"bias": torch.ones(1, N)}, errors.ShapeError, r"bias has shape \[1, 7\]; allowed: \[7\]"),
]
OF_NORM = [
    ({"x": torch.zeros(2, 3, K)}, errors.ShapeError, r"x has shape \[2, 3, 21\]; allowed: \[M, K\] with K >= 1"),
    ({"x": torch.zeros(3, 0)}, errors.ShapeError, r"x has shape \[3, 0\]; allowed: \[M, K\] with K >= 1"),
    ({"x": torch.zeros(3, K).double()}, errors.DtypeError, "x is float64; allowed: float16, bfloat16, float32"),
    ({"residual": torch.zeros(4, K)}, errors.ShapeError, r"residual has shape \[4, 21\]; allowed: \[3, 21\]"),
    ({"residual": torch.zeros(3, K).half()}, errors.DtypeError, "residual is float16; allowed: float32"),
    ({"norm_weight": torch.ones(K).half()}, errors.DtypeError, "norm_weight is float16; allowed: float32"),
    ({"norm_weight": torch.ones(32)}, errors.ShapeError, r"norm_weight has shape \[32\]; allowed: \[21\]"),
    ({"norm_bias": torch.ones(1)}, errors.ShapeError, r"norm_bias has shape \[1\]; allowed: \[21\]"),
    ({"layer": False}, errors.ConfigError, "an RMS norm has no bias"),
]
OF_GATE = [
    ({"gate": torch.zeros(3)}, errors.ShapeError, r"gate has shape \[3\]; allowed: \[M, N\]"),
    ({"gate": torch.zeros(3, K).double()}, errors.DtypeError, "gate is float64; allowed: float16, bfloat16, float32"),
    ({"up": torch.zeros(3, 20)}, errors.ShapeError, r"up has shape \[3, 20\]; allowed: \[3, 21\]"),
    ({"up": torch.zeros(3, K).half()}, errors.DtypeError, "up is float16; allowed: float32"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("op", "changes", "error", "message"),
    [
        *(("norm_w8a8", *case) for case in OF_NORM + OF_PROJECTION),
        *(("gate_w8a8", *case) for case in OF_GATE + OF_PROJECTION),
    ],
)
def test_refusals_name_the_operator_and_what_is_allowed(
    op: str, changes: dict[str, Any], error: Any, message: str, device: str
) -> None:
    with pytest.raises(error, match=f"^qcut::{op}: {message}"):
        called(op, device, **on(device, changes))


@pytest.mark.parametrize("op", ["norm_w8a8", "gate_w8a8"])
def test_activations_and_sizes_are_refused(op: str) -> None:
    with pytest.raises(errors.ConfigError, match="activation 'gelu' does not exist; use one of none, relu"):
        called(op, "cpu", activation="gelu")
    k = K_MAX + 1
    wide, vector = torch.empty(1, k, device="meta"), torch.empty(k, device="meta")
    changes = {"gate": wide, "up": wide, "x": wide, "residual": None, "norm_weight": vector, "norm_bias": vector}
    names = NORM_NAMES if op == "norm_w8a8" else ("gate", "up")
    taken = {name: value for name, value in changes.items() if name in names}
    qweight = torch.empty(N, padded_k(k), dtype=torch.int8, device="meta")
    with pytest.raises(errors.QuantizationError, match=f"{op}: K is {k}; int32 sums are exact for K <= {K_MAX}"):
        called(op, "meta", qweight=qweight, **taken)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("norm_w8a8", name) for name in ("residual", "norm_weight", "norm_bias", "qweight", "weight_scale", "bias")),
        *(("gate_w8a8", name) for name in ("up", "qweight", "weight_scale", "bias")),
    ],
)
def test_mixed_devices_are_refused(op: str, name: str) -> None:
    norm = dict(zip(NORM_NAMES, norm_inputs(torch.float32, "layer", m=3), strict=True))
    linear = dict(zip(LINEAR_NAMES, projection(), strict=True))
    there = {"up": norm["x"], **norm, **linear}[name].to("meta")
    with pytest.raises(errors.DeviceError, match=f"{op}: {name} is on meta; the first argument is on cpu"):
        called(op, "cpu", **{name: there})
