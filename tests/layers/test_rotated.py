"""Rotated W8A8 layers on the CPU: what they compute, and what outliers cost."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import ConfigError, UnsupportedError
from qcut.layers import rotated as rotated_layers
from qcut.layers import rotations
from qcut.numerics import int8
from qcut.numerics.codebook.rotation import rotate_groups
from qcut.numerics.hadamard import walsh_hadamard
from qcut.schemes import padded_k
from tests.support.oracles import FLOATS, NAN, tokens

SIZES = ((128, 128), (384, 128), (192, 128), (130, 128), (96, 64), (40, 32), (16, 128), (1, 128), (512, None))


def layer_of(k: int, group: int | None, **options) -> tuple[nn.Linear, qcut.Linear]:
    module = nn.Linear(k, 33)
    return module, qcut.Linear.from_float(module, qcut.W8A8Rotated(group, seed=5), **options)


def test_rotates_then_computes_as_w8a8():
    for (k, group), dtype in product(SIZES, FLOATS):
        module, layer = layer_of(k, group, activation="relu")
        x, size, bias = tokens(2, 3, k, dtype=dtype), group or k, module.bias.detach()
        q, scale = int8.quantize_weight(rotate_groups(module.weight.detach(), "hadamard", size, 5))
        assert torch.equal(layer.codes, q)
        assert torch.equal(layer.weight_scale, scale)
        assert layer.qweight.shape == (33, padded_k(k))
        rotated = rotate_groups(x.reshape(6, k), "hadamard", size, 5)
        want = int8.w8a8_linear_ref(rotated, layer.qweight, scale, bias, "relu").to(dtype)
        got = layer(x)
        assert (got.shape, got.dtype) == ((2, 3, 33), dtype)
        assert torch.equal(got.reshape(6, 33), want)


@pytest.mark.parametrize(("k", "group", "calls"), [(192, 64, 4), (96, 64, 0), (512, None, 0), (16_416, 32, 0)])
def test_one_token_takes_one_operator(k: int, group: int | None, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 bits, and with groups that kernels rotate themselves; the path of CUDA on the CPU."""
    _, layer = layer_of(k, group, activation="relu")
    given = [tokens(*shape, k, dtype=dtype) for dtype in FLOATS for shape in ((1,), (1, 1), (2,))]
    want, made, run = [layer(x) for x in given], [], rotated_layers._OF_ONE

    def counted(x, *args):
        made.append(x.shape)
        return run(x, *args)

    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)
    monkeypatch.setattr(rotated_layers, "_OF_ONE", counted)
    assert all(map(torch.equal, map(layer, given), want))
    assert made == [(1, k)] * calls


def test_a_group_is_rotated_by_its_own_signs():
    x = torch.randn(2, 96)
    signs = rotate_groups(torch.eye(96), "hadamard", 64, 9)  # rows are what each column becomes
    assert torch.equal(signs.abs() > 0, torch.block_diag(torch.ones(64, 64), torch.ones(32, 32)) > 0)
    torch.testing.assert_close(x @ signs, rotate_groups(x, "hadamard", 64, 9))
    torch.testing.assert_close(signs @ signs.T, torch.eye(96))
    first = signs[:64, :64]
    torch.testing.assert_close(walsh_hadamard(first) / 8, torch.diag(first[:, 0]).sign(), atol=1e-6, rtol=0)


def test_product_is_that_of_the_float_layer():
    for k, group in SIZES:
        module, layer = layer_of(k, group)
        x = torch.randn(64, k)
        assert int8.sqnr_db(module(x).detach(), layer(x)) > 37
        weight = layer.dequantized_weight()
        step = layer.weight_scale[:, None] * 0.51
        rotated_error = rotate_groups(weight - module.weight.detach(), "hadamard", group or k, 5)
        assert (rotated_error.abs() <= step).all()
        ids = torch.tensor([32, 0, 7])
        assert torch.equal(layer.rows(ids), weight[ids])
        product_of = layer.quantized_tokens(x) @ weight.T + layer.bias
        torch.testing.assert_close(layer(x), product_of, atol=1e-4, rtol=1e-4)


def test_outliers_cost_less_after_a_rotation():
    torch.manual_seed(0)
    module, x = nn.Linear(512, 64), torch.randn(128, 512)
    x[:, [3, 200, 411]] *= 60
    with torch.no_grad():
        module.weight[:, [3, 200, 411]] /= 60
    want = module(x).detach()
    lost = {
        scheme: int8.sqnr_db(want, qcut.Linear.from_float(module, scheme)(x))
        for scheme in ("w8a8", "w8a8_rotated_g32", "w8a8_rotated", "w8a8_rotated_rows")
    }
    assert lost["w8a8"] + 8 < lost["w8a8_rotated_g32"] < lost["w8a8_rotated"] < lost["w8a8_rotated_rows"]


def test_bad_token_stays_in_its_row():
    _, layer = layer_of(192, 128)
    x = torch.randn(3, 192)
    x[1, 0] = NAN
    assert layer(x).isnan().all(1).tolist() == [False, True, False]
    assert layer(x).isnan().any(1).tolist() == [False, True, False]


def test_refuses_columns_that_no_rotation_takes():
    for k in (100, 129 + 2, 128 + 96):
        with pytest.raises(ConfigError, match=rf"layer 'up': w8a8_rotated rotates K={k} in groups of .*powers of two"):
            qcut.Linear.from_float(nn.Linear(k, 8), "w8a8_rotated", name="up")


def test_gradients_pass_the_rotation_back():
    module, layer = layer_of(192, 128)
    x = torch.randn(4, 192, requires_grad=True)
    with pytest.raises(UnsupportedError, match="w8a8_rotated_seed5 without"):
        layer(x).sum().backward()
    qcut.enable_input_gradients(layer)
    (got,) = torch.autograd.grad(layer(x).square().sum(), x)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    assert int8.sqnr_db(want, got) > 35


def test_verifying_knows_rotated_steps():
    signs = torch.randint(0, 2, (256, 192)) * 2.0 - 1  # rotated, its rows have larger extremes
    model = nn.Sequential(nn.Linear(192, 256))
    with torch.no_grad():
        model[0].weight.copy_(signs)
    qcut.quantize(model, "w8a8_rotated", verify=torch.randn(8, 192), progress=False)
    assert model[0].scheme == qcut.W8A8Rotated()


def test_reports_and_files(tmp_path):
    model = nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 100), nn.ReLU(), nn.Linear(100, 64))
    x = torch.randn(8, 192)
    report = qcut.quantize(model, "w8a8_rotated_seed3", progress=False)
    assert list(report.schemes.values()) == ["w8a8_rotated_seed3", "w8a8_rotated_seed3", "w8a8_rotated_g32_seed3"]
    assert "groups of 32: a group of 100 of its 100 columns is no power of 2" in str(report)
    want = model(x)
    qcut.save(model, tmp_path / "rotated")
    fresh = nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 100), nn.ReLU(), nn.Linear(100, 64))
    assert torch.equal(qcut.load(tmp_path / "rotated", model=fresh)(x), want)
