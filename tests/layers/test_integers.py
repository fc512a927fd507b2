"""Chains in integers: error against float, state, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import CalibrationError, ConfigError, DtypeError, QuantizationError, ShapeError, UnsupportedError
from qcut.numerics import int8, int16, integers
from qcut.schemes import StaticRange


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(37, 64),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(64, 33, bias=False),
        nn.Linear(33, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    ).eval()


def inputs(count: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(2, 50, 37, generator=g) for _ in range(count)]


def made(bits: int) -> tuple[nn.Sequential, qcut.IntegerChain]:
    float_model = network()
    return float_model, qcut.IntegerChain.from_float(float_model, inputs(), bits=bits)


def sqnr(bits: int) -> float:
    float_model, chain = made(bits)
    x = inputs(4)[-1]
    with torch.no_grad():
        want = float_model(x)
    got = chain(x)
    assert got.shape == want.shape
    assert got.dtype is want.dtype
    return int8.sqnr_db(want, got)


def test_error_against_float() -> None:
    eight, sixteen = sqnr(8), sqnr(16)
    assert 28 < eight < 60
    # int16 tokens leave only the error of int8 weights.
    assert sixteen > eight + 3
    float_model, chain = made(16)
    layers = [module for module in float_model if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for layer in layers:
            q, scale = int8.quantize_weight(layer.weight)
            layer.weight.copy_(int8.dequantize_ref(q, scale))
        x = inputs(4)[-1]
        assert int8.sqnr_db(float_model(x), chain(x)) > 70


def test_layers_do_what_the_definition_says() -> None:
    for bits in (8, 16):
        _, chain = made(bits)
        x = inputs()[0].half()
        q = chain.quantize(x)
        scale, zero_point = chain.input_qparams
        rows = x.reshape(-1, 37)
        if bits == 8:
            want = int8.quantize_per_tensor_ref(rows, scale, zero_point, 37)
        else:
            want = int16.quantize_tensor_ref(rows, scale, 37)
        assert torch.equal(q, want.view(q.shape))
        for layer in chain.layers:
            state = (layer.qweight, layer.bias, layer.multiplier, layer.shift, layer.zero_point, layer.relu)
            want = integers.integer_linear_ref(want, *state)
        assert torch.equal(chain.forward_integers(q).view(want.shape), want)
        zero = 0 if bits == 16 else int(chain.layers[-1].zero_point)
        floats = (want.int() - zero).float() * chain.output_scale
        assert torch.equal(chain(x).view(-1, 10), floats.half())
        assert torch.equal(chain(x[0, :1]), chain(x)[0, :1])


def test_a_relu_ends_at_the_image_of_zero() -> None:
    linear = nn.Linear(16, 8)
    for bits in (8, 16):
        layer = qcut.IntegerLinear.from_float(linear, StaticRange(-2, 2), StaticRange(-1, 3), bits=bits, relu=True)
        dtype = torch.int8 if bits == 8 else torch.int16
        y = layer(torch.randint(-128, 128, (64, 16)).to(dtype) * (1 if bits == 8 else 255))
        zero = int(layer.zero_point) if bits == 8 else 0
        assert int(y.min()) == zero
        assert int(y.max()) > zero


def test_a_changed_scale_is_read_again() -> None:
    _, chain = made(8)
    before = chain.quantize(inputs()[0])
    with torch.no_grad():
        chain.input_scale *= 2
    assert not torch.equal(chain.quantize(inputs()[0]), before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers.1.bias", 2**38),
        ("layers.0.multiplier", 2**24),
        ("layers.0.shift", 63),
        ("layers.2.zero_point", 128),
        ("input_scale", 0.0),
        ("output_scale", float("nan")),
        ("input_zero_point", -129),
    ],
)
def test_states_that_cannot_be_are_refused(key: str, value: float) -> None:
    _, chain = made(8)
    state = chain.state_dict()
    state[key] = torch.full_like(state[key], value)
    with pytest.raises(QuantizationError, match=key.rpartition(".")[2]):
        chain.load_state_dict(state)


def test_padding_must_be_zero() -> None:
    _, chain = made(8)
    state = chain.state_dict()
    state["layers.0.qweight"] = torch.ones_like(state["layers.0.qweight"])
    with pytest.raises(QuantizationError, match="padding"):
        chain.load_state_dict(state)


def test_what_exceeds_64_bits_is_refused_at_construction() -> None:
    linear = nn.Linear(4, 2)
    with torch.no_grad():
        linear.weight.mul_(1e-12)
        linear.bias.fill_(1.0)
    with pytest.raises(QuantizationError, match=r"layer 'deep': bias: found .* are allowed"):
        qcut.IntegerLinear.from_float(linear, StaticRange(-1, 1), StaticRange(-1, 1), bits=16, name="deep")
    with pytest.raises(QuantizationError, match="a step of the sums"):
        qcut.IntegerLinear.from_float(nn.Linear(4, 2), StaticRange(-1e9, 1e9), StaticRange(0, 1e-9))
    with pytest.raises(QuantizationError, match="65536"):
        qcut.IntegerLinear(65_537, 1)
    qcut.IntegerLinear(65_536, 1, device="meta")
    # Rows of weights near 0, without a bias to go with them, do no harm.
    small = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        small.weight.mul_(1e-30)
    layer = qcut.IntegerLinear.from_float(small, StaticRange(-1, 1), StaticRange(-1, 1), bits=16)
    assert layer(torch.full((1, 4), 32_639, dtype=torch.int16)).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: qcut.IntegerChain.from_float(network(), inputs(), bits=4), ConfigError, "bits is 4"),
        (lambda: qcut.IntegerChain.from_float(network(), []), CalibrationError, "no batches"),
        (lambda: qcut.IntegerChain.from_float(network(), [torch.zeros(3, 36)]), CalibrationError, "batch"),
        (lambda: qcut.IntegerChain.from_float(network(), [torch.full((1, 37), float("nan"))]), CalibrationError, "NaN"),
        (lambda: qcut.IntegerChain.from_float(nn.Linear(4, 4), inputs()), UnsupportedError, "nn.Sequential"),
        (lambda: qcut.IntegerChain.from_float(nn.Sequential(nn.ReLU()), inputs()), UnsupportedError, "ReLU"),
        (
            lambda: qcut.IntegerChain.from_float(nn.Sequential(nn.Linear(37, 4), nn.GELU()), inputs()),
            UnsupportedError,
            "GELU",
        ),
        (lambda: qcut.IntegerChain.from_float(nn.Sequential(), inputs()), ConfigError, "no linear layer"),
        (lambda: qcut.IntegerChain([]), ConfigError, "no layers"),
        (
            lambda: qcut.IntegerChain([qcut.IntegerLinear(4, 4), qcut.IntegerLinear(4, 4, bits=16)]),
            ConfigError,
            "8, 16",
        ),
        (lambda: qcut.IntegerChain([qcut.IntegerLinear(4, 5), qcut.IntegerLinear(4, 4)]), ShapeError, "K = 4"),
        (lambda: made(8)[1](torch.zeros(3, 36)), ShapeError, "37"),
        (lambda: made(8)[1].layers[0](torch.zeros(3, 37)), DtypeError, "q is float32"),
        (lambda: qcut.IntegerChain.from_float(Built().half(), [torch.ones(2, 8)]), CalibrationError, "torch.float16"),
        (lambda: made(8)[1].layers[0](torch.zeros(3, 37, dtype=torch.int16)), ShapeError, "zero_point"),
    ],
)
def test_refusals(make, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Built(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


class Squares(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() ** 2


def hooked(at: int | None) -> nn.Sequential:
    model = Built()
    (model if at is None else model[at]).register_forward_hook(lambda module, args, y: y * 2)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Doubled(nn.Linear(8, 8)), r"Doubled computes something of its own"),
        (lambda: CalledAnotherWay(nn.Linear(8, 8)), r"CalledAnotherWay computes something of its own"),
        (lambda: nn.Sequential(nn.Linear(8, 8), Squares()), r"layer '1': found a Squares in a chain"),
        (lambda: hooked(None), r"the Built has hooks"),
        (lambda: hooked(0), r"layer '0': it has hooks"),
        (lambda: hooked(1), r"layer '1': it has hooks"),
    ],
)
def test_chains_of_something_else_are_refused(model: Callable[[], nn.Sequential], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        qcut.IntegerChain.from_float(model(), [torch.randn(4, 8)])


class CalledAnotherWay(nn.Sequential):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 3 * super()._call_impl(*args, **kwargs)


class Twice(dict[str, nn.Module]):
    """Modules of a Sequential that computes the last one twice."""

    def values(self) -> Any:
        return [*super().values(), list(super().values())[-1]]


def test_chain_is_held_to_its_module() -> None:
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8)).train(), torch.randn(64, 8)
    model = nn.Sequential(*plain).train()
    model._modules = Twice(model._modules)
    with pytest.raises(QuantizationError, match=r"one after the other are \d+\.\d% off the module"):
        qcut.IntegerChain.from_float(model, [x])
    assert qcut.IntegerChain.from_float(plain, [x]).training
    assert plain[2].training


def test_subclass_that_only_builds_itself_is_a_chain() -> None:
    model, x = Built(), torch.randn(64, 8)
    with torch.no_grad():
        assert int8.sqnr_db(model(x), qcut.IntegerChain.from_float(model, [x], bits=16)(x)) > 35
