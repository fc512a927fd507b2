"""Layers of nvfp4 on a GPU: quantizing, products, rows and experts, held against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qcut
from qcut.layers.embedding import Embedding
from qcut.layers.experts.linear_stack import LinearStack
from tests.gpu.layers.test_codebook import BRAIN, HALF, LIMIT, layer, on_the_cpu, tokens
from tests.gpu.support.oracles import DEVICE, assert_same


def test_quantizing_is_the_cpus() -> None:
    torch.manual_seed(0)
    module = nn.Linear(320, 136)
    with torch.no_grad():
        module.weight[0] = 0
        module.weight[1] *= 1e-3
    cpu = qcut.Linear.from_float(module, "nvfp4").state_dict()
    gpu = qcut.Linear.from_float(copy.deepcopy(module).to(DEVICE), "nvfp4").state_dict()
    for key, tensor in cpu.items():
        assert gpu[key].dtype is tensor.dtype
        assert_same(gpu[key].cpu().double(), tensor.double())


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_16_bit_products_are_near_the_cpus(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = layer("nvfp4")
    gpu = copy.deepcopy(cpu).to(DEVICE)
    weight, bias = cpu.dequantized_weight().double(), cpu.bias.double()
    assert_same(gpu.dequantized_weight().cpu(), cpu.dequantized_weight())
    for m in (1, 2, 9, 16, 33, 64, 130, 513):
        x = tokens(m, dtype=dtype)
        got = gpu(x.to(DEVICE))
        assert_same(gpu(x.to(DEVICE)), got)
        want = on_the_cpu(cpu, x, monkeypatch).double()
        assert (got.cpu().double() - want).norm() <= LIMIT[dtype] * want.norm()
        exact = x.double() @ weight.t() + bias
        assert (got.cpu().double() - exact).norm() <= LIMIT[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_int8_products_are_the_cpus(dtype: torch.dtype) -> None:
    cpu = layer("nvfp4_int8")
    gpu = copy.deepcopy(cpu).to(DEVICE)
    for m in (1, 9, 64, 130):
        x = tokens(m, dtype=dtype)
        assert_same(gpu(x.to(DEVICE)).cpu(), cpu(x))


def test_rows_of_a_table_are_the_cpus() -> None:
    cpu = Embedding.from_float(nn.Embedding(200, 160), "nvfp4")
    gpu = copy.deepcopy(cpu).to(DEVICE)
    ids = torch.randint(0, 200, (3, 50), generator=torch.Generator().manual_seed(0))
    assert_same(gpu(ids.to(DEVICE)).cpu(), cpu(ids))


def test_stacks_hold_the_layers() -> None:
    """Experts of one stack have scales of their own."""
    layers = []
    for e in range(3):
        torch.manual_seed(e)
        module = nn.Linear(128, 96)
        with torch.no_grad():
            module.weight *= 1 + e
        layers.append(qcut.Linear.from_float(module.to(DEVICE), "nvfp4"))
    stack = LinearStack.of(layers)
    assert len({float(scale) for scale in stack.tensors["norm_scale"][:, 0]}) == 3
    x = tokens(5, 128).to(DEVICE)
    for e, one in enumerate(layers):
        assert_same(stack.expert(e)(x), one(x))
