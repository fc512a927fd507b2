"""Products that multiply gate and up, on the CPU: bitwise `silu_mul` of their halves, fakes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qcut.ops
from qcut import errors
from qcut.codebooks import tokens as rotated_tokens
from qcut.codebooks.products import pack_book
from qcut.layers.base import Linear
from qcut.layers.codebook import CodebookLinear
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut
K, HALF = 256, 35
NAMES = ("int8_linear", "w8a16_linear", "codebook_gemm", "codebook_gemv")


def product(name: str, dtype: torch.dtype = torch.float16, *, bias: bool = True, half: int = HALF) -> Any:
    """An operator by its keyword arguments, of three tokens, but for ``codebook_gemv``'s one."""
    torch.manual_seed(half)
    module, x = torch.nn.Linear(K, 2 * half, bias=bias), torch.randn(1 if name == "codebook_gemv" else 3, K).to(dtype)
    if name == "int8_linear":
        layer = Linear.from_float(module, "w8a8")
        q, q_scale = OPS.quantize_per_token(x, K)
        given = {"q": q, "q_scale": q_scale, "dtype": dtype, "absmax": torch.tensor([0.0, 1e9, 0.0])}
    elif name == "w8a16_linear":
        layer, given = Linear.from_float(module, "w8a16"), {"x": x[None]}
    if not name.startswith("codebook"):
        weight = {"qweight": layer.qweight, "weight_scale": layer.weight_scale, "bias": layer.bias}
        return getattr(OPS, name), {**given, **weight, "activation": "none"}
    layer = CodebookLinear.from_float(module, "codebook4")
    seeds = list(layer.scheme.seeds)
    operands = rotated_tokens.operands("hadamard", layer.group_size, K, seeds, torch.float16)
    if name == "codebook_gemm":
        blocks, _ = OPS.rotate_tokens(x, operands, "hadamard", layer.group_size, seeds, dtype)
        given = {"x": blocks, "row_scale": None, "m": len(x)}
    else:
        given = {"x": x, "operands": operands, "group_size": layer.group_size, "seeds": seeds}
    weight = {"units": layer.units, "norms": layer.packed_norms, "fold": None, "col_scale": layer.col_scale}
    weight |= {"book": list(pack_book(layer.codebook, dtype)), "bias": layer.bias, "bits": 4, "activation": "none"}
    return getattr(OPS, name), {**given, **weight, "residual": None, "out_dtype": dtype}


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_results_are_silu_mul_of_the_halves(name: str, dtype: torch.dtype, bias: bool) -> None:
    if dtype is torch.float32 and name.startswith("codebook"):
        return
    op, given = product(name, dtype, bias=bias)
    apart, fused = copied(given), copied(given)
    absmax = apart.pop("absmax", None)
    gate, up = op(**apart).flatten(0, -2).chunk(2, 1)
    want = OPS.silu_mul(gate, up, absmax)
    got = op(**fused, gated=True)
    assert got.dtype is dtype
    assert got.is_contiguous()
    assert torch.equal(got.flatten(0, -2), want)
    if absmax is not None:
        assert torch.equal(fused["absmax"], absmax)
        assert absmax[1] == 1e9


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "w8a16", "int16x8", "codebook4", "codebook4+2", "int4"])
def test_every_layer_has_a_gated_form(scheme: str) -> None:
    static = {"static_range": qcut.config.StaticRange(-3.0, 3.0)} if scheme == "w8a8_static" else {}
    layer = Linear.from_float(torch.nn.Linear(K, 128), scheme, **static)
    x = torch.randn(3, K)
    assert torch.equal(layer.forward_gated(x), OPS.silu_mul(*layer(x).chunk(2, 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    op, given = product(name)
    torch.library.opcheck(op.default, (), {**given, "gated": True})


@pytest.mark.parametrize("name", NAMES)
def test_what_gate_and_up_do_not_go_with(name: str) -> None:
    op, given = product(name)
    with pytest.raises(errors.ConfigError, match=f"{name}: gated goes with activation none, and without a residual"):
        op(**{**given, "activation": "silu"}, gated=True)
    if "residual" in given:
        residual = torch.zeros(given.get("m", 1), 2 * HALF).half()
        with pytest.raises(errors.ConfigError, match="without a residual"):
            op(**{**given, "residual": residual}, gated=True)
    if "qweight" in given:
        odd = {key: given[key][1:] for key in ("qweight", "weight_scale", "bias")}
    else:
        odd = {key: given[key][1:] for key in ("col_scale", "bias")}
    with pytest.raises(errors.ShapeError, match=f"{name}: gate and up have 69 rows together; allowed: an even number"):
        op(**{**given, **odd}, gated=True)
