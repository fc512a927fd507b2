"""Activations of an MLP: the modules' arithmetic, registration, refusals."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    plain, turned = torch.randn(3, 8), torch.randn(8, 3).t()
    for x in (plain, turned):  # results are contiguous
        torch.library.opcheck(OPS.gelu_tanh.default, (x,))
        for up in (plain + 1, turned + 1):
            torch.library.opcheck(OPS.silu_mul.default, (x, up))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("to", [torch.float16, torch.int8])
def test_rotated_activations_are_the_activations_rotated(to: torch.dtype) -> None:
    gate, up = torch.randn(9, 2 * 160).half().chunk(2, 1)
    signs = operands("hadamard", 32, 160, (3,), torch.float16)
    for x, factor, y in ((gate, up, OPS.silu_mul(gate, up)), (gate, None, OPS.gelu_tanh(gate))):
        rotated = OPS.rotate_tokens(y, signs, "hadamard", 32, (3,), to)
        for got, want in zip(OPS.activate_rotated(x, factor, signs, 32, (3,), to), rotated, strict=True):
            assert torch.equal(got, want)
        torch.library.opcheck(OPS.activate_rotated.default, (x, factor, signs, 32, (3,), to))


def test_activations_refuse() -> None:
    x, signs = torch.zeros(2, 64).half(), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(errors.ShapeError, match=r"activate_rotated: up has shape \[2, 32\]"):
        OPS.activate_rotated(x, x[:, :32], signs, 32, (1,), torch.int8)
    with pytest.raises(errors.DtypeError, match="activate_rotated: out_dtype is bfloat16"):
        OPS.activate_rotated(x, None, signs, 32, (1,), torch.bfloat16)
    with pytest.raises(errors.ConfigError, match="activate_rotated: groups of 24 of 64 columns"):
        OPS.activate_rotated(x, None, signs, 24, (1,), torch.int8)
    with pytest.raises(errors.ShapeError, match=r"gelu_tanh: x has shape \[4\]; allowed: \[M, N\]"):
        OPS.gelu_tanh(torch.zeros(4))
    with pytest.raises(errors.ShapeError, match=r"silu_mul: up has shape \[2, 3\]"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(errors.DtypeError, match="silu_mul: up is float16"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 4).half())
