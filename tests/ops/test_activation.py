"""Activations of an MLP: the modules' arithmetic, registration, refusals."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut import errors

OPS = torch.ops.qcut
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


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


def test_activations_refuse() -> None:
    with pytest.raises(errors.ShapeError, match=r"gelu_tanh: x has shape \[4\]; allowed: \[M, N\]"):
        OPS.gelu_tanh(torch.zeros(4))
    with pytest.raises(errors.ShapeError, match=r"silu_mul: up has shape \[2, 3\]"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(errors.DtypeError, match="silu_mul: up is float16"):
        OPS.silu_mul(torch.zeros(2, 4), torch.zeros(2, 4).half())
