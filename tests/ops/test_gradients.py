"""Backward passes through operators and layers: refused, wherever a forward pass with gradients is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from tests.support.oracles import layer

OPS = torch.ops.qcut
pytestmark = pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")


WEIGHT = layer()
CACHE = torch.randn(2, 2, 1, 4, 21)


def linear(x: Tensor) -> Tensor:
    result: Tensor = OPS.w8a8_linear(x, WEIGHT["qweight"], WEIGHT["scale"], WEIGHT["bias"], "none")
    return result


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "w8a8_linear": linear,
    "quantize_per_token": lambda x: OPS.quantize_per_token(x, 32)[1],
    "silu_mul": lambda x: OPS.silu_mul(x, torch.ones_like(x)),
    "gelu_tanh": lambda x: OPS.gelu_tanh(x, torch.zeros(len(x))),
    "add_norm": lambda x: OPS.add_norm(x, None, torch.ones(21), None, False, 1e-6)[1],
    "embed_rows": lambda x: OPS.embed_rows(torch.tensor([1, 0]), x, None, None, None, torch.float32),
    "gemm_s8": lambda x: OPS.gemm_s8(
        torch.ones(2, 16).char(), torch.ones(21, 16).char(), residual=x, out_dtype=torch.float32
    ),
    "decode_attention": lambda x: OPS.decode_attention(x[:, None], *CACHE, None, None, torch.tensor([1, 3]).int(), 1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_refuses_a_backward_pass(name: str) -> None:
    x, call = torch.randn(2, 21, requires_grad=True), CALLS[name]
    y = call(x)
    with torch.no_grad():
        assert torch.equal(y, call(x))
    assert y.requires_grad
    with pytest.raises(UnsupportedError, match=f"qcut::{name}: .* for inference only"):
        (y * 2).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_recorded_where_no_gradient_is_wanted(name: str) -> None:
    x = torch.randn(2, 21)
    assert not CALLS[name](x).requires_grad
    with torch.no_grad():
        assert not CALLS[name](x.requires_grad_()).requires_grad


def test_a_parameter_that_requires_gradients_counts_too() -> None:
    bias = WEIGHT["bias"].clone().requires_grad_()
    y = OPS.w8a8_linear(torch.randn(2, 21), WEIGHT["qweight"], WEIGHT["scale"], bias, "none")
    with pytest.raises(UnsupportedError, match="w8a8_linear"):
        y.sum().backward()


def test_operators_that_write_refuse_tensors_with_gradients() -> None:
    q, places = torch.randn(2, 1, 8), torch.zeros(2, dtype=torch.int32)
    cache = torch.zeros(2, 2, 1, 4, 8)
    k = torch.randn(2, 1, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="append_kv: writes to tensors of a graph"):
        OPS.append_kv(q, k, k, None, None, places, places, *cache, None, None)
    logits = torch.randn(2, 5, requires_grad=True)  # what is written here has no gradient
    OPS.advance(logits, torch.zeros(2, dtype=torch.int64), places, places.clone(), 4)


def model(scheme: str) -> nn.Module:
    middle = Linear.from_float(nn.Linear(64, 64), scheme, name="mid")
    return nn.Sequential(nn.Linear(64, 64), middle, nn.Linear(64, 64))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4", "codebook4+3_int8"])
def test_a_layer_refuses_a_backward_pass_by_name(scheme: str) -> None:
    net, x = model(scheme), torch.randn(3, 64)
    y = net(x)
    with torch.no_grad():
        assert torch.equal(y, net(x))
    with pytest.raises(UnsupportedError, match=r"layer 'mid': .*for inference only"):
        y.sum().backward()
    net[0].requires_grad_(False)
    net(x).sum().backward()  # nothing before the layer is trained
    assert net[2].weight.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_refuses(reentrant: bool) -> None:
    y = checkpoint(model("w8a8"), torch.randn(3, 64, requires_grad=True), use_reentrant=reentrant)
    with pytest.raises(UnsupportedError, match="layer 'mid'"):
        y.sum().backward()


def test_a_compiled_layer_refuses() -> None:
    net, x = model("w8a8"), torch.randn(3, 64)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, net(x))
    with pytest.raises(UnsupportedError, match="layer 'mid'"):
        y.sum().backward()


def test_a_compiled_operator_refuses() -> None:
    x = torch.randn(3, 21, requires_grad=True)
    y = torch.compile(lambda x: linear(2 * x), backend="aot_eager")(x)
    with pytest.raises(UnsupportedError, match="w8a8_linear"):
        y.sum().backward()
    whole = torch.compile(lambda x: linear(2 * x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="w8a8_linear: an argument to be compiled has gradients"):
        whole(x)
    with torch.no_grad():
        assert torch.equal(whole(x), linear(2 * x))
