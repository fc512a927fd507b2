"""One token of codebook weights after a norm or a gate: bitwise what the operators give one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qcut import ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.codebook_linear import CodebookLinear
from qcut.joined import after_gate, after_norm
from tests.gpu.oracles import DEVICE, assert_same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EPS = 1e-6


def layer_of(n: int, k: int, scheme: str = "codebook4", dtype: torch.dtype = torch.float16) -> CodebookLinear:
    torch.manual_seed(n + k)
    made = CodebookLinear.from_float(nn.Linear(k, n, bias=n % 3 == 0).to(DEVICE, dtype), scheme)
    assert isinstance(made, CodebookLinear)
    return made


def row(k: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(1, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


SHAPES = ((96, 256), (320, 512), (6144, 4096), (4096, 1280), (64, 2048), (128, 11008), (200, 384))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms(norm: str, n: int, k: int, dtype: torch.dtype) -> None:
    layer = layer_of(n, k, dtype=dtype)
    x, residual, weight, bias = (row(k, dtype, seed) for seed in range(4))
    is_layer = norm == "layer"
    for added in (residual, None):
        arguments = (x, added, weight[0], bias[0] if is_layer else None, is_layer, EPS)
        joined = after_norm(layer, *arguments)
        assert joined is not None
        total, y = torch.ops.qcut.add_norm(*arguments)
        assert_same(joined[0], total)
        assert_same(joined[1], layer(y))
        again = after_norm(layer, *arguments)
        assert again is not None
        assert_same(again[1], joined[1])


@pytest.mark.parametrize("scheme", ["codebook4", "codebook3", "codebook4+4"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gates(n: int, k: int, scheme: str) -> None:
    layer = layer_of(n, k, scheme)
    both = torch.cat([row(k, torch.float16, 0), row(k, torch.float16, 1)], -1)
    gate, up = both.chunk(2, -1)
    if not layer.takes_one(gate):
        assert after_gate(layer, gate, up) is None
        return
    joined = after_gate(layer, gate, up)
    assert joined is not None
    assert_same(joined, layer(torch.ops.qcut.silu_mul(gate, up)))


def test_two_passes_after_a_norm() -> None:
    layer = layer_of(128, 512, "codebook4+4")
    x, weight = row(512, torch.float16, 0), row(512, torch.float16, 1)[0]
    arguments = (x, None, weight, None, False, EPS)
    joined = after_norm(layer, *arguments)
    expected = layer(torch.ops.qcut.add_norm(*arguments)[1])
    if joined is not None:
        assert_same(joined[1], expected)


def test_more_tokens_are_two_operators() -> None:
    layer = layer_of(96, 256)
    x, weight = torch.cat([row(256, torch.float16, 0)] * 2), row(256, torch.float16, 1)[0]
    assert after_norm(layer, x, None, weight, None, False, EPS) is None
    assert after_gate(layer, x, x) is None
