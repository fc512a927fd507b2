"""Activations of an MLP: the modules' arithmetic, registration, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors
from qcut.numerics.codebook.tokens import operands
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_are_transformers(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 24).to(dtype)
    assert torch.equal(OPS.silu_mul(gate, up), ACT2FN["silu"](gate) * up)
    assert torch.equal(OPS.gelu_tanh(gate), ACT2FN["gelu_new"](gate))


GATES = (
    (1.0, 1e6, False),
    (1.702, 7.0, True),
    (1.0, 3.3, False),
    (0.5, 0.0, True),
    (1.0, 0.0, True),
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("alpha", "limit", "plus_one"), GATES)
def test_clamped_gates_are_float64s_of_rounded_parts(
    dtype: torch.dtype, alpha: float, limit: float, plus_one: bool
) -> None:
    """Within a rounding of silu, of up + 1 and of the result each; and extremes."""
    gate, up = (torch.randn(2, 40, 64) * torch.logspace(-3, 2, 40)[:, None]).to(dtype)
    gate[0, :5] = up[1, :5] = torch.tensor([0.0, -0.0, float("inf"), -300.0, float("nan")])
    got = OPS.silu_mul(gate, up, None, alpha, limit, plus_one)
    most = float(torch.tensor(limit).to(dtype)) or float("inf")
    g, u = gate.double().clamp(max=most), up.double().clamp(-most, most)
    want = (u + 1 if plus_one else u) * g * torch.sigmoid(alpha * g)
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[dtype]
    allowed = (3.1 * unit + (8 + 2 * alpha * g.abs()) * 2.0**-24) * want.abs()  # of float32, the exponent's too
    finite = want.abs() < 0.99 * torch.finfo(dtype).max
    slack = torch.finfo(dtype).smallest_normal * (1 + g.abs()) * (1 + u.abs())  # exp overflows in float32
    assert ((got.double() - want).abs() <= allowed + slack)[finite].all()
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("dtype", FLOATS)
def test_clamped_gates_are_those_of_gpt_oss(dtype: torch.dtype) -> None:
    gate, up = (4 * torch.randn(2, 30, 64)).to(dtype)
    module = SimpleNamespace(alpha=1.702, limit=7.0)
    want = GptOssExperts._apply_gate(module, torch.stack((gate, up), -1).flatten(1))
    got = OPS.silu_mul(gate, up, None, 1.702, 7.0, True)
    # The module rounds alpha * gate, the sigmoid, glu, up + 1 and the result.
    few = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[dtype]
    error = (got.double() - want.double()).abs()
    assert (error <= few * (10 + 1.702 * gate.abs()) * want.double().abs() + 2e-4 * (dtype is torch.float16)).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    plain, turned = torch.randn(3, 8), torch.randn(8, 3).t()
    for x in (plain, turned):  # results are contiguous
        torch.library.opcheck(OPS.gelu_tanh.default, (x,))
        for up in (plain + 1, turned + 1):
            torch.library.opcheck(OPS.silu_mul.default, (x, up))
            torch.library.opcheck(OPS.silu_mul.default, (x, up, None, *GATES[0]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("to", [torch.float16, torch.int8])
def test_rotated_activations_are_the_activations_rotated(to: torch.dtype) -> None:
    gate, up = torch.randn(9, 2 * 160).half().chunk(2, 1)
    signs = operands("hadamard", 32, 160, (3,), torch.float16)
    clamped = [(gate, up, OPS.silu_mul(gate, up, None, *numbers), numbers) for numbers in GATES]
    for x, factor, y, numbers in (
        (gate, up, OPS.silu_mul(gate, up), ()),
        (gate, None, OPS.gelu_tanh(gate), ()),
        *clamped,
    ):
        rotated = OPS.rotate_tokens(y, signs, "hadamard", 32, (3,), to)
        for overload in (OPS.activate_rotated, OPS.activate_rotated.early_read):
            for got, want in zip(overload(x, factor, signs, 32, (3,), to, *numbers), rotated, strict=True):
                assert torch.equal(got, want)
        torch.library.opcheck(OPS.activate_rotated.default, (x, factor, signs, 32, (3,), to, *numbers))
        if to is torch.int8:
            given, rows = (x, factor, signs, 32, (3,), to, *numbers), {"in_rows": True}
            want = OPS.quantize_rotated(y, signs, 32, 3)
            assert all(map(torch.equal, OPS.activate_rotated.early_read(*given, **rows), want))
            torch.library.opcheck(OPS.activate_rotated.default, given, rows)


def test_activations_refuse() -> None:
    x, signs = torch.zeros(2, 64).half(), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(errors.ShapeError, match=r"activate_rotated: up has shape \[2, 32\]"):
        OPS.activate_rotated(x, x[:, :32], signs, 32, (1,), torch.int8)
    with pytest.raises(errors.DtypeError, match="activate_rotated: out_dtype is bfloat16"):
        OPS.activate_rotated(x, None, signs, 32, (1,), torch.bfloat16)
    with pytest.raises(errors.ConfigError, match="activate_rotated: groups of 24 of 64 columns"):
        OPS.activate_rotated(x, None, signs, 24, (1,), torch.int8)
    for numbers, message in (
        ((0.0,), "alpha is 0.0; allowed: positive, and at most 1e\\+06"),
        ((float("nan"),), "alpha is nan"),
        ((1e7,), "alpha is 10000000.0"),
        ((1.0, -1.0), "limit is -1.0; allowed: positive, and at most 1e\\+06, or 0 for none"),
        ((1.0, float("inf")), "limit is inf"),
    ):
        with pytest.raises(errors.ConfigError, match=f"silu_mul: {message}"):
            OPS.silu_mul(x, x, None, *numbers)
        with pytest.raises(errors.ConfigError, match=f"activate_rotated: {message}"):
            OPS.activate_rotated(x, x, signs, 32, (1,), torch.int8, *numbers)
    for numbers in ((1.702,), (1.0, 7.0), (1.0, 0.0, True)):
        with pytest.raises(errors.ConfigError, match="activate_rotated: alpha, limit and plus_one go with up"):
            OPS.activate_rotated(x, None, signs, 32, (1,), torch.int8, *numbers)
    with pytest.raises(errors.ShapeError, match=r"gelu_tanh: x has shape \[4\]; allowed: \[M, N\]"):
        OPS.gelu_tanh(torch.zeros(4))
    with pytest.raises(errors.ShapeError, match=r"silu_mul: up has shape \[2, 3\]"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(errors.DtypeError, match="silu_mul: up is float16"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 4).half())
