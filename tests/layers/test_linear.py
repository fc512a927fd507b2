"""qcut.Linear on the CPU: construction, arithmetic, state, moves, copies, compilation, refusals."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn

import qcut
from qcut import errors
from qcut.layers.int8 import W8A8Linear, W8A8StaticLinear, W8A16Linear
from qcut.layers.linear import Linear
from qcut.numerics import float8, int16
from qcut.numerics import int8 as numerics
from qcut.schemes import ACTIVATIONS, K_MAX, K_MAX_ZERO_POINT, W8A8, Float, StaticRange, padded_k
from tests.support.oracles import FLOATS, INF, NAN, tokens

SCHEMES = ("w8a8", "w8a8_static", "w8a16", "int16x8", "int16x8_static")
FLOAT8 = ("fp8", "fp8_dynamic", "fp8_static")
RANGE = StaticRange(-3.0, 4.0)


def conv1d(n: int, k: int) -> nn.Module:
    """transformers' own: the weight is [K, N]."""
    conv: nn.Module = pytest.importorskip("transformers.pytorch_utils").Conv1D(n, k)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_()
    return conv


def quantized(scheme: str, n: int = 33, k: int = 21, bias: bool = True, **options) -> tuple[nn.Linear, Linear]:
    module = nn.Linear(k, n, bias)
    static_range = RANGE if scheme.endswith("_static") else None
    return module, Linear.from_float(module, scheme, static_range=static_range, **options)


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left
    )


# ── construction and arithmetic ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_is_the_scheme_on_quantized_weights(scheme):
    for dtype, (n, k), bias in product(FLOATS, [(1, 1), (33, 21), (16, 64)], [True, False]):
        module, layer = quantized(scheme, n, k, bias, activation="relu")
        q, scale = numerics.quantize_weight(module.weight)
        assert layer.qweight.shape == (n, padded_k(k))
        assert torch.equal(layer.qweight[:, :k], q)
        assert (layer.qweight[:, k:] == 0).all()
        assert torch.equal(layer.weight_scale, scale)
        x = tokens(2, 3, k, dtype=dtype)
        flat, b = x.reshape(6, k), None if module.bias is None else module.bias.detach()
        if scheme == "w8a8_static":
            x_scale, zp = numerics.static_qparams(RANGE.lo, RANGE.hi)
            col_scale = scale * torch.tensor(x_scale)
            colsum = q.sum(1, dtype=torch.int32)
            want = numerics.w8a8_static_linear_ref(flat, layer.qweight, col_scale, colsum, b, x_scale, zp, "relu")
        elif scheme == "int16x8_static":
            x_scale = int16.static_scale(RANGE.lo, RANGE.hi)
            col_scale = scale * torch.tensor(x_scale)
            want = int16.int16x8_static_linear_ref(flat, layer.qweight, col_scale, b, x_scale, "relu")
        else:
            want = getattr(int16 if scheme == "int16x8" else numerics, f"{scheme}_linear_ref")(
                flat, layer.qweight, scale, b, "relu"
            )
        got = layer(x)
        assert (got.shape, got.dtype) == ((2, 3, n), dtype)
        assert torch.equal(got.reshape(6, n), want)


@pytest.mark.parametrize("scheme", FLOAT8)
def test_forward_multiplies_floats_of_8_bits(scheme):
    for dtype, (n, k), bias in product(FLOATS, [(1, 1), (33, 21), (16, 64)], [True, False]):
        module, layer = quantized(scheme, n, k, bias, activation="relu")
        q, scale = float8.quantize_weight(module.weight.detach())
        assert layer.qweight.shape == (n, padded_k(k))
        assert torch.equal(layer.codes.view(torch.int8), q.view(torch.int8))
        assert torch.equal(layer.weight_scale, scale)
        x = tokens(2, 3, k, dtype=dtype)
        flat, b = x.reshape(6, k), None if module.bias is None else module.bias.detach()
        if scheme == "fp8":
            want = numerics.w8a16_linear_ref(flat, layer.qweight, scale, b, "relu")
        elif scheme == "fp8_dynamic":
            want = float8.dynamic_linear_ref(flat, layer.qweight, scale, b, "relu")
        else:
            x_scale = float8.static_scale(RANGE.lo, RANGE.hi)
            want = float8.static_linear_ref(flat, layer.qweight, scale * torch.tensor(x_scale), b, x_scale, "relu")
        got = layer(x)
        assert (got.shape, got.dtype) == ((2, 3, n), dtype)
        assert torch.equal(got.reshape(6, n), want)


@pytest.mark.parametrize("scheme", [*SCHEMES, *FLOAT8])
def test_close_to_the_float_layer(scheme):
    for activation in ACTIVATIONS:
        module, layer = quantized(scheme, 128, 256, activation=activation)
        x = torch.rand(64, 256) * 7 - 3
        functions = {
            "none": lambda v: v,
            "relu": torch.relu,
            "gelu_erf": nn.functional.gelu,
            "gelu_tanh": lambda v: nn.functional.gelu(v, approximate="tanh"),
            "silu": nn.functional.silu,
        }
        want = functions[activation](module(x)).detach()
        assert numerics.sqnr_db(want, layer(x)) > (28 if scheme in FLOAT8 else 38)


def test_keyword_is_that_of_the_float_layer():
    layer, x = Linear.from_float(nn.Linear(32, 16), "w8a16"), torch.randn(2, 32)
    assert torch.equal(layer(input=x), layer(x))
    table = qcut.Embedding.from_float(nn.Embedding(8, 32))
    assert torch.equal(table(input=torch.arange(8)), table(torch.arange(8)))


def test_transformers_conv1d():
    transformers = pytest.importorskip("transformers.pytorch_utils")
    conv = transformers.Conv1D(7, 20)
    x = torch.randn(3, 20)
    assert numerics.sqnr_db(conv(x).detach(), Linear.from_float(conv)(x)) > 30


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_weights_of_every_float_dtype_on_their_device(dtype):
    module = nn.Linear(20, 7).to(dtype).eval()
    before = copy.deepcopy(module)
    layer = Linear.from_float(module)
    assert torch.equal(layer.bias, module.bias.detach().float())
    assert not layer.training
    assert same_state(module, before)
    (held,) = layer.parameters()
    assert held.nbytes == 0
    assert not held.requires_grad
    assert held.numel() == 7 * 20 + (7 if layer.bias is not None else 0)
    assert Linear.from_float(module.train()).training


def test_bias_is_a_copy():
    module, layer = quantized("w8a8")
    before = layer.bias.clone()
    module.bias.data.zero_()
    assert torch.equal(layer.bias, before)


def test_dequantized_weight_and_view():
    module, layer = quantized("w8a8", 33, 21)
    error = (layer.dequantized_weight() - module.weight).abs()
    assert layer.dequantized_weight().dtype is torch.float32
    assert (error <= layer.weight_scale[:, None] * 0.5001).all()
    assert layer.weight.shape == (33, 21)
    assert layer.weight.dtype is torch.float32
    assert layer.weight_bytes == 33 * 32 + 33 * 4 + 33 * 4


def test_bad_token_stays_in_its_row():
    for scheme in ("w8a8", "fp8_dynamic", "fp8_static"):
        _, layer = quantized(scheme)
        x = torch.randn(3, 21)
        x[1, 0] = NAN
        assert layer(x).isnan().any(1).tolist() == [False, True, False]
    x[1, 0] = INF
    assert layer(x).isfinite().all()  # one scale saturates
    assert quantized("fp8_dynamic")[1](x).isnan().any(1).tolist() == [False, True, False]


def test_a_scheme_finds_the_class_that_names_it():
    for scheme, expected in (("w8a8", W8A8Linear), ("w8a8_static", W8A8StaticLinear), ("w8a16", W8A16Linear)):
        layer = qcut.Linear(8, 4, scheme=scheme)
        assert type(layer) is Linear.subclass_for(scheme) is expected
        assert type(pickle.loads(pickle.dumps(layer))) is type(copy.deepcopy(layer)) is expected
        assert isinstance(layer, qcut.Linear)
        assert hasattr(layer, "forward_int8") == (scheme == "w8a8")
    with pytest.raises(errors.ConfigError, match=r"qcut\.Linear has no scheme 'fp16'; use w8a8"):
        Linear(8, 4, scheme="fp16")
    with pytest.raises(errors.ConfigError, match="layer 'x': W8A16Linear has no scheme 'w8a8'"):
        W8A16Linear(8, 4, scheme="w8a8", name="x")


def test_repr_tells_what_it_is():
    _, layer = quantized("w8a8_static", 33, 21, activation="gelu_tanh")
    assert repr(layer) == "Linear(in_features=21, out_features=33, bias=True, scheme=w8a8_static, activation=gelu_tanh)"


# ── state ────────────────────────────────────────────────────────────────────────────────────────


def test_static_keys():
    _, layer = quantized("w8a8_static")
    assert {key: (tuple(t.shape), t.dtype) for key, t in layer.state_dict().items()} == {
        "qweight": ((33, 32), torch.int8),
        "weight_scale": ((33,), torch.float32),
        "col_scale": ((33,), torch.float32),
        "colsum": ((33,), torch.int32),
        "input_scale": ((1,), torch.float32),
        "input_zero_point": ((1,), torch.int32),
        "bias": ((33,), torch.float32),
    }


def test_loading_replaces_the_cached_input_scale():
    module, layer = quantized("w8a8_static")
    x = torch.randn(3, 21)
    layer(x)
    other = Linear.from_float(module, "w8a8_static", static_range=StaticRange(0.0, 1.0))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_buffers_set_one_by_one():
    _, layer = quantized("w8a8_static")
    other = Linear(21, 33, True, "w8a8_static", device="meta")
    for key, value in layer.state_dict().items():
        setattr(other, key, value)
    x = torch.randn(3, 21)
    assert torch.equal(layer(x), other(x))


# ── compilation ──────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_compiles_a_chain():
    """Only layers and views, for which nothing is to be compiled in C++; the GPU's tests have other functions too."""
    first, second = (quantized(scheme, 32, 32, activation="silu")[1] for scheme in ("w8a8", "w8a8_static"))
    chain = nn.Sequential(first, nn.Unflatten(1, (4, 8)), nn.Flatten(), second)
    x = torch.randn(32, 3).t()
    assert torch.equal(torch.compile(chain, fullgraph=True)(x), chain(x))


@torch.no_grad()
def test_compiles_after_loading():
    _, layer = quantized("w8a8_static")
    other = Linear(21, 33, True, "w8a8_static")
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 21)
    assert torch.equal(torch.compile(other, fullgraph=True, backend="aot_eager")(x), layer(x))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("scheme", "k_max"), [("w8a8", K_MAX), ("w8a8_static", K_MAX_ZERO_POINT)])
def test_k_beyond_the_exact_range(scheme, k_max):
    static_range = RANGE if scheme.endswith("_static") else None
    with pytest.raises(
        errors.QuantizationError, match=rf"K={k_max + 1}\]; {scheme} allows N >= 1 and K in \[1, {k_max}\]"
    ):
        Linear.from_float(nn.Linear(k_max + 1, 1), scheme, static_range=static_range)
    assert Linear(k_max, 1, True, scheme, device="meta").in_features == k_max
    assert Linear.from_float(nn.Linear(k_max + 1, 1), "w8a16").in_features == k_max + 1


def test_largest_k_is_exact():
    module = nn.Linear(K_MAX, 1, bias=False)
    module.weight.data.fill_(1.0)
    y = Linear.from_float(module)(torch.full((1, K_MAX), -1.0))
    assert y.item() == pytest.approx(-K_MAX, rel=1e-6)


def test_meta_and_integer_weights():
    with pytest.raises(errors.UnsupportedError, match="the weight is on the meta device"):
        Linear.from_float(nn.Linear(3, 4, device="meta"))
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(errors.DtypeError, match="layer 'x': the weight is int8; allowed: float16, bfloat16"):
        Linear.from_float(module, name="x")


def test_schemes_and_ranges():
    module = nn.Linear(3, 4)
    with pytest.raises(errors.ConfigError, match=r"has no scheme 'fp16'; use w8a8, .*, int16x8 or a codebook"):
        Linear.from_float(module, Float())
    with pytest.raises(errors.ConfigError, match="scheme 'w4' does not exist"):
        Linear.from_float(module, "w4")
    with pytest.raises(errors.ConfigError, match="activation 'gelu' does not exist"):
        Linear.from_float(module, activation="gelu")
    with pytest.raises(errors.ConfigError, match="layer 'x': scheme w8a8_static got static_range none, it takes one"):
        Linear.from_float(module, W8A8("static"), name="x")
    with pytest.raises(errors.ConfigError, match=r"scheme w8a16 got static_range StaticRange\(.*, it takes none"):
        Linear.from_float(module, "w8a16", static_range=RANGE)


@pytest.mark.parametrize("bias", [False, True])
def test_tokens_quantized_before_give_the_same(bias: bool) -> None:
    layer = Linear.from_float(torch.nn.Linear(40, 24, bias=bias), "w8a8", activation="relu")
    x = torch.randn(5, 40)
    q, scale = torch.ops.qcut.quantize_per_token(x, layer.qweight.shape[1])
    assert torch.equal(layer.forward_int8(q, scale, x.dtype), layer(x))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_loading_refuses_scales_that_are_not_positive(value):
    _, layer = quantized("w8a8_static", name="mid")
    state = layer.state_dict() | {"input_scale": torch.tensor([value])}
    with pytest.raises(errors.QuantizationError, match=r"layer 'mid': input_scale is .*; allowed: positive and finite"):
        Linear(layer.in_features, layer.out_features, True, "w8a8_static", name="mid").load_state_dict(state)


def test_loading_refuses_zero_points_out_of_range():
    _, layer = quantized("w8a8_static")
    state = layer.state_dict() | {"input_zero_point": torch.tensor([128], dtype=torch.int32)}
    with pytest.raises(errors.QuantizationError, match="input_zero_point is 128; allowed: -128 to 127"):
        Linear(layer.in_features, layer.out_features, True, "w8a8_static").load_state_dict(state)


def test_written_or_replaced_static_range_is_read_again():
    _, layer = quantized("w8a8_static")
    scale, zero_point = layer.input_qparams
    layer.input_scale.mul_(2)
    assert layer.input_qparams == (2 * scale, zero_point)
    layer.input_zero_point = torch.tensor([5], dtype=torch.int32)
    assert layer.input_qparams == (2 * scale, 5)
    layer._buffers["input_scale"] = torch.tensor([0.5])
    assert layer.input_qparams == (0.5, 5)
    reads = layer._read
    assert layer.double().input_qparams == copy.deepcopy(layer).input_qparams == (0.5, 5)
    assert layer._read.value is reads.value, "moving reads nothing"
