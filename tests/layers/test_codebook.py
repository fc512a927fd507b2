"""qcut.Linear under codebook schemes, on the CPU: arithmetic, memory, state, refusals."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut import errors
from qcut.conversion.planning.costs import LayerSize, memory_cost
from qcut.layers import rotations
from qcut.layers.codebook import CodebookLinear
from qcut.layers.int8 import W8A8Linear
from qcut.layers.linear import Linear
from qcut.numerics import int8 as numerics
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.packing import pack
from qcut.numerics.codebook.passes import quantize_weight
from qcut.numerics.codebook.quantizer import RotatedCodebook, dequantize, quantize, quantize_plain
from qcut.numerics.codebook.tokens import rotate_tokens
from qcut.schemes import ACTIVATIONS, K_MAX, Codebook, StaticRange, parse_scheme
from tests.support.oracles import FLOATS, NAN

SCHEMES = (
    *("codebook4", "codebook3", "codebook2", "codebook4+4", "codebook4+2", "codebook3_g64_qr", "codebook4_g32"),
    *("codebook4_g50_qr", "codebook2+2_rows_qr_fp32norms", "codebook4_none", "int4", "int3_g32", "nvfp4"),
    *("codebook4_pairs", "codebook4_pairs_g50_qr_fp32norms"),
)
INT8 = ("codebook4_int8", "codebook4+4_int8", "codebook4+3_int8", "codebook3_g32_qr_int8", "int4_int8", "nvfp4_int8")
INT8 += ("codebook4_pairs_int8", "codebook4_pairs_g32_int8")
TWO_SETS = ("codebook4+2", "codebook4+3_int8")


def quantized(scheme: str, n: int = 77, k: int = 320, bias: bool = True, **options) -> tuple[nn.Linear, CodebookLinear]:
    torch.manual_seed(len(scheme) + n)
    module = nn.Linear(k, n, bias)
    layer = Linear.from_float(module, scheme, **options)
    assert isinstance(layer, CodebookLinear)
    return module, layer


def float64_weight(q: RotatedCodebook) -> Tensor:
    """The weight of one pass, group by group, from rotation matrices."""
    n, k = q.indices.shape
    out = torch.zeros(n, k, dtype=torch.float64)
    for g, (first, d) in enumerate(rotation.groups(k, q.group_size)):
        index = q.indices[:, first : first + d].long()
        if q.values.dim() == 2:
            group = q.values.double()[index[:, ::2] + 16 * index[:, 1::2]].flatten(1)
        else:
            group = q.values.double()[index]
        if q.rotation != "none":
            matrix = rotation.rotate(torch.eye(d, dtype=torch.float64), q.rotation, q.seed + first).t()
            group = group @ matrix / d**0.5
        out[:, first : first + d] = q.float_norms()[:, g, None].double() * group
    return out


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_is_the_dequantized_weight(scheme):
    for bias in [True, False]:
        _, layer = quantized(scheme, bias=bias, activation="relu")
        weight = sum(float64_weight(q) for q in layer.passes)
        x = torch.randn(2, 3, 320)
        want = x.double() @ weight.t()
        want = (want + layer.bias.double() if bias else want).relu()
        got = layer(x)
        assert (got.shape, got.dtype) == ((2, 3, 77), torch.float32)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        # A weight is a float32 sum of a group's products, in any order. By Cauchy and Schwarz their magnitudes add up
        # to no more than norm * largest value; a matrix's entries, values, root and norm add a rounding each.
        sizes = sum(float(q.float_norms().abs().max()) * float(q.values.abs().max()) for q in layer.passes)
        terms = min(layer.group_size, 320)
        assert (layer.dequantized_weight() - weight).abs().max() <= (terms + 4) * 2**-24 * sizes


@pytest.mark.parametrize("scheme", INT8)
def test_int8_products_are_exact_integers(scheme):
    for dtype in FLOATS:
        _, layer = quantized(scheme)
        x = torch.randn(5, 320).to(dtype)
        rows, row_scale = rotate_tokens(x, layer.kind, layer.group_size, layer.scheme.seeds, torch.int8)
        total, first = None, 0
        for i, bits in enumerate(layer.set_bits):
            units, norms, fold, col_scale, values = layer.sets()[i]
            weight = codebook_layout.int8_weight(units, bits, norms, values.half(), fold)[:77]
            tokens = rows[:, first : first + weight.shape[1]]
            first += weight.shape[1]
            v = (tokens.long() @ weight.long().t()).float() * row_scale[:, None] * col_scale
            v = v + layer.bias if i + 1 == len(layer.set_bits) else v
            total = v if total is None else v + total
        assert first == rows.shape[1]
        assert torch.equal(layer(x), total.to(dtype))


@pytest.mark.parametrize(
    ("scheme", "decibels"),
    [
        *(("codebook2", 8.5), ("codebook3", 13.8), ("codebook4", 19.3), ("codebook4+4", 38.5), ("codebook4+2", 28.0)),
        *(("codebook4_g64_qr", 19.3), ("codebook4_int8", 18.8), ("codebook4+4_int8", 33.0), ("int4", 16.5)),
        *(("codebook4_pairs", 20.2), ("codebook4_pairs_int8", 19.6)),
    ],
)
def test_close_to_the_float_layer(scheme, decibels):
    for activation in ACTIVATIONS:
        module = nn.Linear(512, 128)
        torch.nn.init.normal_(module.weight)
        layer = Linear.from_float(module, scheme, activation=activation)
        x = torch.randn(64, 512)
        want = numerics.apply_activation(module(x).detach(), activation)
        assert numerics.sqnr_db(want, layer(x)) > decibels


def test_equal_steps_are_integers_times_a_scale():
    for bits in [2, 3, 4]:
        for norm_dtype in [torch.float16, torch.float32]:
            weight = torch.randn(9, 70)
            weight[3] = 0
            q = quantize_plain(weight, bits, group_size=32, levels="steps", norm_dtype=norm_dtype)
            half = 1 << (bits - 1)
            for g, (first, d) in enumerate([(0, 32), (32, 32), (64, 6)]):
                w = weight[:, first : first + d].numpy()
                scale = (np.abs(w).max(1) / np.float32(half - 0.5)).astype(np.float32)
                scale = torch.from_numpy(scale).to(norm_dtype).float().numpy()
                steps = np.clip(np.rint(w / np.where(scale > 0, scale, 1)[:, None]), -half, half - 1)
                assert np.array_equal(q.norms[:, g].float().numpy(), scale)
                assert np.array_equal(q.values[q.indices[:, first : first + d].long()].numpy(), steps)
            assert q.indices.max() < 2 * half
            assert dequantize([q])[3].eq(0).all()


def test_identity_tokens_give_the_weight():
    _, layer = quantized("int4", 33, 96, bias=False)
    assert torch.equal(layer(torch.eye(96)).t(), layer.dequantized_weight())


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "codebook4+2"])
def test_zero_rows_give_the_bias(scheme):
    module = nn.Linear(160, 33)
    module.weight.data[5] = 0
    layer = Linear.from_float(module, scheme)
    assert torch.equal(layer(torch.randn(4, 160))[:, 5], layer.bias[5].expand(4))


def test_rows_are_independent():
    for scheme in ("codebook4_int8", "int4_int8", "nvfp4_int8"):
        _, layer = quantized(scheme)
        x = torch.randn(6, 320)
        alone = layer(x[2:3])
        x[0, 0] = NAN
        together = layer(x)
        assert torch.equal(together[2:3], alone)
        assert together.isnan().any(1).tolist() == [True] + [False] * 5


def test_calibrated_weights_lose_less():
    torch.manual_seed(0)
    module = nn.Linear(128, 64, bias=False)
    x = torch.randn(2000, 128) @ torch.randn(128, 128).mul_(torch.logspace(0, -2, 128)[:, None])
    moment = x.t() @ x / len(x)
    for scheme in ("codebook4", "codebook3+2"):
        plain, fitted = Linear.from_float(module, scheme), Linear.from_float(module, scheme, second_moment=moment)
        want = module(x).detach()
        assert numerics.sqnr_db(want, fitted(x)) > numerics.sqnr_db(want, plain(x)) + 2
    with pytest.raises(errors.ConfigError, match="layer 'x': scheme int4 got a second moment"):
        Linear.from_float(module, "int4", second_moment=moment, name="x")
    with pytest.raises(errors.ConfigError, match="layer 'x': scheme w8a8 got a second moment"):
        Linear.from_float(module, "w8a8", second_moment=moment, name="x")


# ── construction and memory ──────────────────────────────────────────────────────────────────────


def test_linear_is_the_door():
    for layer in (
        Linear(64, 32, True, "codebook4", "relu", "meta", "h"),
        Linear(64, 32, scheme=Codebook(3), device="meta"),
        CodebookLinear(64, 32, scheme="int4", device="meta"),
    ):
        assert type(layer) is CodebookLinear
        assert isinstance(layer, qcut.Linear)
        assert {b.device.type for b in layer.buffers()} == {"meta"}
    assert type(Linear(64, 32)) is W8A8Linear


@pytest.mark.parametrize("scheme", [*SCHEMES, *INT8])
def test_bytes_are_what_the_cost_model_says(scheme):
    for bias in [True, False]:
        _, layer = quantized(scheme, bias=bias)
        assert layer.weight_bytes == sum(b.nbytes for b in layer.buffers())
        assert layer.weight_bytes == memory_cost(LayerSize("x", 77, 320, bias, 0), scheme)
        assert ("residual_units" in layer._buffers) == (scheme in TWO_SETS)


def test_four_bits_are_four_and_a_half():
    layer = Linear(4096, 4096, False, "codebook4", device="meta")
    assert 4.25 <= 8 * layer.weight_bytes / 4096**2 < 4.27
    assert repr(layer) == (
        "CodebookLinear(in_features=4096, out_features=4096, bias=False, scheme=codebook4, activation=none, "
        "bits_per_weight=4.26)"
    )


def test_weight_says_what_model_code_asks():
    _, layer = quantized("codebook4")
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((77, 320), torch.float32, "cpu")
    assert layer.weight.untyped_storage().data_ptr() == layer.units.untyped_storage().data_ptr()


@pytest.mark.parametrize("scheme", [*SCHEMES, *INT8])
def test_passes_round_trip(scheme):
    _, layer = quantized(scheme)
    again = CodebookLinear.from_passes(layer.passes, layer.bias, scheme)
    assert again.scheme == layer.scheme == parse_scheme(scheme)
    for (name, a), (other, b) in zip(layer.named_buffers(), again.named_buffers(), strict=True):
        assert name == other
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_from_passes_takes_what_passes_say():
    passes = quantize_weight(torch.randn(8, 96), parse_scheme("codebook3+2_g32_qr_seed7_fp32norms"))
    layer = CodebookLinear.from_passes(passes, None, "codebook4_int8")
    assert layer.scheme.name == "codebook3+2_g32_qr_seed7_fp32norms_int8"
    assert layer.bias is None
    own = CodebookLinear.from_passes([quantize(torch.randn(8, 96), 2, seed=3, group_size=32)], torch.ones(8).half())
    assert own.scheme.name == "codebook2_g32_seed3"
    assert own.bias.dtype is torch.float32


def test_relative_norms_of_extreme_rows():
    """Norms near float16's ends meet a power of two for each row: nothing overflows or vanishes."""
    weight = torch.randn(4, 128) * torch.tensor([1e-3, 1.0, 3e3, 0.0])[:, None]
    layer = CodebookLinear.from_passes([quantize(weight)], None)
    assert layer.packed_norms.max() <= 1
    relative = codebook_layout.unpack_norms(layer.packed_norms)[:3].float()
    assert ((relative > 0.5) & (relative <= 1)).all()
    power = (layer.col_scale[:3, None] * 128**0.5).log2().round().exp2()
    assert torch.equal(relative * power, layer.norms[:3].float())


# ── state ────────────────────────────────────────────────────────────────────────────────────────


def test_state_is_in_plain_order():
    module, layer = quantized("codebook3+2_qr", 5, 70)
    first, second = quantize_weight(module.weight, layer.scheme)
    state = layer.state_dict()
    keys = ("indices", "norms", "codebook")
    assert tuple(state) == (*keys, *(f"residual_{key}" for key in keys), "bias")
    assert torch.equal(state["indices"], pack(first.indices, 3))
    assert torch.equal(state["residual_indices"], pack(second.indices, 2))
    assert torch.equal(state["residual_norms"], second.norms)
    assert torch.equal(state["codebook"], first.values)


def test_a_wrong_state_is_refused():
    _, layer = quantized("codebook4")
    good = layer.state_dict()
    for change, message in (
        (
            {"indices": good["indices"][:, :-1]},
            r"indices: found torch.uint8 \[77, 159\]; allowed: torch.uint8 \[77, 160",
        ),
        ({"norms": good["norms"].float()}, "norms: found torch.float32"),
        ({"norms": -good["norms"]}, "norms hold NaN, Inf or a negative number"),
        ({"codebook": good["codebook"].flip(0)}, "allowed: finite values, ascending"),
        ({"extra": good["bias"]}, 'Unexpected key.*"extra"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            copy.deepcopy(layer).load_state_dict({**good, **change})
    del good["norms"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"norms"'):
        layer.load_state_dict(good)
    assert layer.load_state_dict(good, strict=False).missing_keys == ["norms"]


def test_pairs_without_symmetric_signs_are_refused():
    _, layer = quantized("codebook4_pairs")
    good = layer.state_dict()
    other = good["codebook"].clone()
    other[70, 1] *= 2
    with pytest.raises(RuntimeError, match="a codebook of pairs; allowed: finite points, the same with other signs"):
        layer.load_state_dict({**good, "codebook": other})
    key, problem = layer.state_problem({**good, "codebook": other})
    assert (key, problem) == ("codebook", "found other points; finite points, the same with other signs, are allowed")
    assert layer.state_problem(good) is None
    layer.codebook.copy_(other)
    with pytest.raises(errors.ConfigError, match="a codebook of pairs; allowed: finite points, the same with other"):
        layer._books()


def test_in_a_model_and_under_its_name():
    model = nn.Sequential(nn.LayerNorm(64), quantized("codebook4+4", 32, 64)[1])
    other = nn.Sequential(nn.LayerNorm(64), Linear(64, 32, True, "codebook4+4"))
    assert "1.residual_indices" in model.state_dict()
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(model(x), other(x))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def test_sizes_that_cannot_be():
    with pytest.raises(errors.ConfigError, match=r"layer 'l': a Hadamard rotation of 72 columns \(from column 128"):
        Linear.from_float(nn.Linear(200, 3), "codebook4", name="l")
    with pytest.raises(errors.QuantizationError, match=r"layer 'l': 2 passes of K=70000, 70016 with padding; int8"):
        Linear(70_000, 1, True, "codebook4+4_qr_int8", device="meta", name="l")
    assert Linear(K_MAX + 1, 1, True, "codebook4_qr", device="meta").in_features == K_MAX + 1


def test_schemes_that_do_not_fit():
    module = nn.Linear(64, 3)
    with pytest.raises(errors.ConfigError, match="layer 'x': CodebookLinear has no scheme 'w8a8'"):
        CodebookLinear.from_float(module, "w8a8", name="x")
    with pytest.raises(errors.ConfigError, match="layer 'x': scheme codebook4 got static_range"):
        Linear.from_float(module, "codebook4", static_range=StaticRange(-1.0, 1.0), name="x")


def test_passes_that_do_not_go_together():
    first, second = quantize_weight(torch.randn(8, 64), parse_scheme("codebook4+4"))
    make = CodebookLinear.from_passes

    def changed(**fields) -> RotatedCodebook:
        return RotatedCodebook(**{**vars(second), **fields})

    for passes, message in (
        ([], "0 passes; allowed: 1 or 2"),
        ([first] * 3, "3 passes"),
        ([first, changed(rotation="qr")], "passes differ in shape, group size, rotation"),
        ([first, changed(norms=second.norms.float())], "the dtype of their norms"),
        ([first, changed(values=second.values * 2)], "two passes of one width with different codebooks"),
        ([changed(values=second.values[:5])], "a codebook of 5 values; allowed: 4, 8, 16"),
        ([changed(values=second.values.flip(0))], "allowed: finite values, ascending"),
    ):
        with pytest.raises(errors.ConfigError, match=f"layer 'x': .*{message}"):
            make(passes, None, name="x")
    (double,) = quantize_weight(torch.randn(8, 64), parse_scheme("codebook4_pairs"))
    assert make([double], None, "codebook4_int8").scheme.name == "codebook4_pairs_int8"
    assert make([first], None, "codebook4_pairs").scheme.name == "codebook4"
    with pytest.raises(errors.ConfigError, match="layer 'x': 2 passes of pairs; allowed: 1"):
        make([double, double], None, name="x")
    odd = RotatedCodebook(**{**vars(double), "indices": double.indices[:, :63]})
    with pytest.raises(errors.ConfigError, match="layer 'x': groups of 63 of 63 columns; pairs take even numbers"):
        make([odd], None, name="x")
    with pytest.raises(errors.ShapeError, match=r"layer 'x': norms have shape \[8, 2\]; allowed: \[8, 1\]"):
        make([changed(norms=second.norms.repeat(1, 2))], None, name="x")
    with pytest.raises(errors.QuantizationError, match="layer 'x': norms hold NaN, Inf or a negative number"):
        make([changed(norms=-second.norms)], None, name="x")
    with pytest.raises(errors.ShapeError, match=r"layer 'x': bias has shape \[7\]; allowed: \[8\]"):
        make([first], torch.zeros(7), name="x")


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4+2"])
def test_written_or_replaced_codebook_is_read_again(scheme):
    layer = Linear.from_float(nn.Linear(64, 64), scheme)
    books = layer._books()
    assert layer._books() is books
    layer.codebook.mul_(2)
    doubled = layer._books()
    assert doubled[0] != books[0]
    assert doubled[1:] == books[1:]
    layer.codebook = layer.codebook / 2
    assert layer._books() == books
    reads = layer._read.value
    assert layer.double()._books() is reads, "moving reads nothing"


def test_threads_share_the_operands_of_a_rotation(monkeypatch):
    made = rotations.rotated_tokens.operands

    def slow(*args):
        time.sleep(0.01)
        return made(*args)

    monkeypatch.setattr(rotations.rotated_tokens, "operands", slow)
    rotation, barrier = rotations.Rotation(rotations.RotationSpec("hadamard", 64, 64, (77,))), threading.Barrier(4)

    def get(_):
        barrier.wait()
        return rotation.operands(torch.float16, torch.device("cpu"))

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(get, range(4)))
    assert {id(t) for t in got} == {id(got[0])}, "a graph may read each"
