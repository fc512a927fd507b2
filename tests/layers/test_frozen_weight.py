"""The parameter that stands for a quantized weight: seen by tools, held by no file."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import UnsupportedError
from qcut.layers.quantized import FrozenWeight, float_dtype


def net(scheme: str = "w8a8", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32, bias=False)).to(dtype).eval()
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return model


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4_g16", "int16x8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_those_of_the_float_model(scheme: str, dtype: torch.dtype) -> None:
    model = net(scheme, dtype)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == 32 * 48 + 48 + 48 * 32
    assert sum(p.nelement() * p.element_size() for p in parameters) == 0
    assert {(p.dtype, p.device.type, p.requires_grad) for p in parameters} == {(dtype, "cpu", False)}
    assert not any(key.endswith(".weight") for key in model.state_dict())
    assert model.half()[0].weight_dtype == next(model.parameters()).dtype == torch.float16
    assert model.double()[0].weight.dtype == torch.float64


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4_g16"])
def test_copies_and_pickles_hold_their_own(scheme: str) -> None:
    model, x = net(scheme), torch.randn(3, 32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        held, mine = other[0]._parameters["weight"], model[0]._parameters["weight"]
        assert isinstance(held, FrozenWeight)
        assert held is not mine
        assert held.of is other[0]._buffers
        assert isinstance(mine, FrozenWeight)
        assert held.numel() == mine.numel()
        assert torch.equal(other(x), model(x))


def test_state_dicts_load_where_nothing_was() -> None:
    model = net()
    with torch.device("meta"):
        empty = nn.Sequential(qcut.Linear(32, 48), qcut.Linear(48, 32, bias=False))
    empty.load_state_dict(model.state_dict(), assign=True)
    assert {p.device.type for p in empty.parameters()} == {"cpu"}
    moved = nn.Sequential(qcut.Linear(32, 48, device="meta"))
    assert next(moved.to_empty(device="cpu").parameters()).device.type == "cpu"


def test_optimizers_and_exports_pass_them_by() -> None:
    model, x = net(), torch.randn(3, 32)
    before = model(x)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert torch.equal(model(x), before)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), before)


def test_model_dtype_is_that_of_its_floats() -> None:
    model = nn.Sequential(net(), nn.LayerNorm(32, dtype=torch.bfloat16))
    assert float_dtype(model) == torch.bfloat16
    assert float_dtype(net()) == torch.float32


def test_other_weights_are_refused_in_a_call() -> None:
    x = torch.randn(3, 32)
    plain = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)).eval()
    for model in (net(), plain):
        if model is plain:
            qcut.quantize(plain, "w8a8", allow_growth=True, progress=False)  # called as one with its activation
        with pytest.raises(UnsupportedError, match="layer '0': its weight is quantized, and it is called with another"):
            torch.func.functional_call(model, {"0.weight": torch.zeros(48, 32)}, (x,))
        own = {name: p.detach() for name, p in model.named_parameters()}
        assert torch.equal(torch.func.functional_call(model, own, (x,)), model(x))
