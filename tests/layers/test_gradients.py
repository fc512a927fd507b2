"""Gradients of quantized layers with respect to their inputs: held against float64 with the dequantized weight."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qcut
from qcut.errors import DtypeError, QuantizationError, UnsupportedError
from qcut.layers import gradients
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.layers.stacking import Stacker
from qcut.schemes import ACTIVATIONS, StaticRange
from tests.support.oracles import FLOATS
from tests.support.zoo import tiny_lm, token_batches

SCHEMES = (
    *("w8a8", "w8a8_static", "w8a16", "codebook4", "codebook3_g16", "codebook4_qr", "codebook2_none"),
    *("codebook4+4", "codebook4+3_int8", "codebook4_g16_int8", "int4", "nvfp4", "fp8_dynamic", "fp8_static"),
)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
CURVATURE = 1.2
"""Above the second derivative of every activation: 0.8 for gelu's, 0.5 for silu's, 0 next to the bend of relu's."""
ACTIVATE = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def layer_of(scheme: str, n: int = 48, k: int = 64, activation: str = "none", bias: bool = True) -> Linear:
    torch.manual_seed(n + k)
    static_range = StaticRange(-3.0, 3.5) if scheme.endswith("_static") else None
    module = nn.Linear(k, n, bias)
    layer = Linear.from_float(module, scheme, activation=activation, static_range=static_range, name="mid")
    qcut.enable_input_gradients(layer)
    return layer


def wanted(layer: Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x in float64 by autograd, and how far one of dy's dtype may lie from it, both ``[M, K]``."""
    weight = layer.dequantized_weight().double()
    bias = weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
    tokens = x.detach().double().requires_grad_()
    z = F.linear(tokens, weight, bias.double())
    slope = torch.autograd.grad(ACTIVATE[layer.activation](z), z, torch.ones_like(z), retain_graph=True)[0]
    ACTIVATE[layer.activation](z).backward(dy.double())
    assert tokens.grad is not None

    single, own = UNIT[torch.float32], UNIT[dy.dtype]
    n, k = weight.shape
    size = weight.abs()
    # Columns that a matrix rotates are sums of K float32 products.
    weight_error = own * size + 4 * k * single * weight.norm(dim=1, keepdim=True)
    d, d_error = dy.double().abs(), torch.zeros_like(z)
    if layer.activation != "none":
        z_error = 2 * (k + 1) * single * (tokens.detach().abs() @ size.T + bias.double().abs())
        assert layer.activation != "relu" or (z.detach().abs() > z_error).all()
        d_error = d * (CURVATURE * z_error + 16 * single * (1 + z.detach().abs()) + own * slope.abs())
        d = d * slope.abs()
    error = d_error @ (size + weight_error) + d @ weight_error + (n * single + own) * (d @ size)
    return tokens.grad, error + torch.finfo(dy.dtype).smallest_normal


def gradient(layer: Linear, x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    layer(x).backward(dy)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_is_that_of_the_dequantized_weight(scheme: str, dtype: torch.dtype) -> None:
    layer, x, dy = layer_of(scheme), torch.randn(2, 3, 64).to(dtype), torch.randn(2, 3, 48).to(dtype)
    found = gradient(layer, x, dy)
    value, error = wanted(layer, x.view(-1, 64), dy.view(-1, 48))
    assert found.dtype == dtype
    assert ((found.view(-1, 64).double() - value).abs() <= error).all()
    assert error.max() < 0.05 * value.abs().max()  # the bound says something


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_activations_are_differentiated(activation: str, dtype: torch.dtype) -> None:
    for scheme in ("w8a16", "codebook4"):
        layer, x = layer_of(scheme, activation=activation, bias=scheme == "w8a16"), torch.randn(7, 64).to(dtype)
        dy = torch.randn(7, 48).to(dtype)
        value, error = wanted(layer, x, dy)
        assert ((gradient(layer, x, dy).double() - value).abs() <= error).all()


def test_sizes_and_strides_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("w8a8", n=5, k=37)
    x, dy = torch.randn(37, 6).T, torch.randn(1, 5).expand(6, 5)
    value, error = wanted(layer, x, dy)
    assert ((gradient(layer, x, dy).double() - value).abs() <= error).all()
    monkeypatch.setattr(gradients, "row_chunks", lambda n, k: iter([slice(0, 2), slice(2, 4), slice(4, 5)]))
    assert ((gradient(layer, x, dy).double() - value).abs() <= error).all()
    assert gradient(layer, torch.randn(0, 37), torch.randn(0, 5)).shape == (0, 37)
    assert gradient(layer, torch.randn(37), torch.randn(5)).shape == (37,)


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_switch_changes_no_bit_and_keeps_few_tensors(scheme: str, activation: str) -> None:
    layer, x = layer_of(scheme, activation=activation), torch.randn(3, 64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert [t.shape for t in kept] == ([] if activation == "none" else [x.shape])
    qcut.disable_input_gradients(layer)
    assert torch.equal(y, layer(x))
    with pytest.raises(UnsupportedError, match=r"layer 'mid': .*enable_input_gradients"):
        layer(x).sum().backward()


def test_nothing_of_it_runs_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of("w8a8"), torch.randn(3, 64)
    monkeypatch.setattr("qcut.layers.linear.InputGradient", None)
    assert not layer(x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        assert not layer(x).requires_grad
    with pytest.raises(AttributeError):
        layer(x)


def test_one_float_weight_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = gradients._weight

    def noted(*args: Any) -> Tensor:
        gc.collect()
        assert all(weight() is None for weight in made)
        weight = make(*args)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(gradients, "_weight", noted)
    net = nn.Sequential(*(layer_of("codebook4", 64, 64, act) for act in ("none", "silu", "none", "relu")))
    net(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert len(made) == 4


def test_weights_stay_frozen() -> None:
    net = nn.Sequential(nn.Linear(64, 64), layer_of("w8a8", 64), nn.Linear(64, 8))
    before = {key: t.clone() for key, t in net[1].state_dict().items()}
    net(torch.randn(3, 64)).sum().backward()
    assert net[0].weight.grad is not None
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert trained == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(b.grad is None and not b.requires_grad for b in net[1].buffers())
    assert all(torch.equal(t, before[key]) for key, t in net[1].state_dict().items())


def test_buffers_cannot_be_trained() -> None:
    layer = layer_of("w8a8")
    assert layer.bias is not None
    layer.bias.requires_grad_()
    with pytest.raises(UnsupportedError, match="layer 'mid': bias requires a gradient"):
        layer(torch.randn(3, 64, requires_grad=True))


def test_a_second_derivative_is_refused() -> None:
    layer, x = layer_of("w8a16"), torch.randn(3, 64, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"layer 'mid': w8a16: a second derivative .*create_graph"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same(reentrant: bool) -> None:
    net = nn.Sequential(layer_of("w8a8", 64, activation="gelu_tanh"), layer_of("codebook4", 64))
    x = torch.randn(3, 64, requires_grad=True)
    plain = torch.autograd.grad(net(x).square().sum(), x)[0]
    checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4+3_int8", "codebook4_qr"])
def test_compiled_layers_give_the_same(scheme: str) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(64, 64), layer_of(scheme, 64, activation="silu"), layer_of(scheme, 64))
    x = torch.randn(3, 64)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, net(x))
    weight = net[0].weight
    found = torch.autograd.grad(y.square().sum(), weight)[0]
    assert torch.equal(found, torch.autograd.grad(net(x).square().sum(), weight)[0])
    with torch.no_grad():
        assert torch.equal(compiled(x), net(x))


def test_autocast_does_not_change_the_layer() -> None:
    layer, x = layer_of("w8a8"), torch.randn(3, 64, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


def test_copies_and_stacks_keep_the_switch() -> None:
    layer = layer_of("w8a8")
    assert copy.deepcopy(layer).input_gradients
    assert pickle.loads(pickle.dumps(layer)).input_gradients
    pair = nn.ModuleList([layer_of("codebook4", 64), layer_of("codebook4", 128)])
    x, dy = torch.randn(3, 64), torch.randn(3, 192)
    first, second = (gradient(one, x, part) for one, part in zip(pair, dy.split([64, 128], 1), strict=True))
    one = Stacker(pair).stack(list(pair))
    assert isinstance(one, Linear)
    torch.testing.assert_close(gradient(one, x, dy), first + second)
    qcut.disable_input_gradients(pair[1])
    mixed = Stacker(pair).stack(list(pair))
    assert isinstance(mixed, Linear)
    assert not mixed.input_gradients


def test_model_with_quantized_embeddings_trains_other_layers() -> None:
    model, ids = tiny_lm(), token_batches()[0]
    qcut.quantize(model, "codebook4_g16", embeddings="w8a16", progress=False)
    assert any(isinstance(m, Embedding) for m in model.modules())
    qcut.enable_input_gradients(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    optimizer = torch.optim.Adam(trained, 1e-2)
    for _ in range(5):
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in trained)
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))


def test_models_without_quantized_layers_are_refused() -> None:
    with pytest.raises(QuantizationError, match="Sequential: no quantized layer"):
        qcut.enable_input_gradients(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(DtypeError, match=r"an nn\.Module"):
        qcut.disable_input_gradients("gpt2")  # type: ignore[arg-type]


def test_backward_hooks_of_replaced_layers_are_kept():
    model, seen = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), []
    model[0].register_full_backward_hook(lambda module, given, wanted: seen.append(wanted[0].shape))
    qcut.quantize(model, "w8a8", allow_growth=True, progress=False)
    qcut.enable_input_gradients(model)
    model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert seen == [(4, 32)]
